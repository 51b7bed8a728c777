"""Container jobs of one worker in SQLite; `store` is the front."""
