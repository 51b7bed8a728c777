"""Model files: what their headers say, where they are kept, and where they come from."""
