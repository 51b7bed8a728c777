"""A folder is the queue, a local model does the work (seed 004).

The path of a job's directory is its state, and every transition is one rename; there is no
database. In front of it is any program that can make a folder, behind it llama.cpp.
"""
