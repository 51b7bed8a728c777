"""Text and tokens: only the origin of a job knows them."""
