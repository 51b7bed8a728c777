"""llama.cpp, in processes of its own: one for each model that is loaded."""
