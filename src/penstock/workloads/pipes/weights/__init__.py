"""Where a model's numbers come from, layer by layer.

A `Source` is opened once and asked for single layers and for the ends; what is not asked for is
not read. Whatever is on the disk (safetensors or GGUF), the
tensors have the names that transformers gives them, and its config.json's words describe them.

Nothing in a model's folder is ever run: no pickle is opened, no code of the model is imported.
"""
