"""A fresh context for each job, computed alone: the way of the system that seed 004 describes.

Its workers each make a context of llama.cpp's default of four threads, decode the whole prompt,
and free it. Through another binding, because ours has no contexts.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from spooled.prompts import PROMPTS, TOKENS

HEAD = (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
    "<|im_end|>\n<|im_start|>user\n"
)
TAIL = "<|im_end|>\n<|im_start|>assistant\n"


def measure(model_file: str, workers: int, threads: int) -> dict[str, Any]:
    from cyllama.llama import llama_cpp as llama

    llama.disable_logging()
    llama.ggml_backend_load_all()
    model = llama.LlamaModel(model_file, llama.LlamaModelParams())
    vocab = model.get_vocab()

    def one(prompt: str) -> tuple[int, str]:
        tokens = vocab.tokenize(HEAD + prompt + TAIL, True, True)
        params = llama.LlamaContextParams()
        params.n_ctx = len(tokens) + TOKENS + 64
        params.n_threads = params.n_threads_batch = threads
        context = llama.LlamaContext(model, params)
        try:
            return generated(llama, context, vocab, tokens)
        finally:
            context.close()

    one("Hello.")
    wall, cpu = time.perf_counter(), time.process_time()
    with ThreadPoolExecutor(workers) as pool:
        answers = list(pool.map(one, PROMPTS))
    return {
        "wall": time.perf_counter() - wall,
        "cpu": time.process_time() - cpu,
        "tokens": sum(count for count, _ in answers),
        "texts": [text for _, text in answers],
    }


def generated(llama: Any, context: Any, vocab: Any, tokens: list[int]) -> tuple[int, str]:
    sampler = llama.LlamaSampler(llama.LlamaSamplerChainParams())
    sampler.add_greedy()
    context.decode(llama.llama_batch_get_one(tokens))
    said = b""
    for count in range(TOKENS):
        place = len(tokens) + count
        token = sampler.sample(context, -1)
        if vocab.is_eog(token):
            return count, said.decode(errors="replace")
        piece = vocab.token_to_piece(token, 0, True)
        said += piece if isinstance(piece, bytes) else piece.encode()
        context.decode(llama.llama_batch_get_one([token], place))
    return TOKENS, said.decode(errors="replace")
