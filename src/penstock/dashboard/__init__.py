"""The web page: files that a browser is sent. It reads the same HTTP API as every other client."""
