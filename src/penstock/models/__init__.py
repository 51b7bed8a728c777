"""Language models on disk: file headers, names, the model store, and downloads.

Used by whatever computes (llama.cpp, split models), by the command line and by `doctor`.
"""
