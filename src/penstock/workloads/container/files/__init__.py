"""A job's folder: what comes in, what is written, what is left, all of it capped."""
