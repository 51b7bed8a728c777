"""The Runner on llama.cpp: a process for each loaded model, which may die without harm to ours."""
