"""How nodes talk: TLS with the network's key, frames of bytes, and a sign of life.

`messages` (what is said, and what is refused), `identity` (who may join, and where nodes are),
`connection` (one peer, over the house's TLS transport in `ports.tls`).
"""
