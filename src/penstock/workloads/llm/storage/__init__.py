"""Stores of OpenAI files and batches: a folder, and in memory."""
