"""A workspace on disk: layout, durable files, metadata, and who serves it."""
