"""How nodes talk: TLS with the network's key, frames of bytes, and a sign of life.

From the bottom up: `kinds` (what a frame can be), `counters` (what was refused, and why),
`frames` (bytes to frames), `messages` and `steps` (what is in them), `identity` (who may join),
`tls` and `stream` (frames that nobody else reads), `pulse` (who is still there), `connection` (one
peer), `dialing` and `listener` (how one comes about).
"""
