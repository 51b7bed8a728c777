"""How nodes talk: TLS with the network's key, frames of bytes, and a sign of life.

From the bottom up: `frames` (bytes to frames, and what was refused), `messages` (what is in the
small ones), `identity` (who may join), `pulse` (who is still there), `connection` (one peer),
`endpoints` (how one comes about).
"""
