"""A worker that stands alone: its queue, its records, its restarts, what it says of itself."""
