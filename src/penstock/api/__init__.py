"""The HTTP API: the engine's EngineApi over HTTP, under `/v1`.

A request's way: `connection` (limits of the socket) -> `application` (host, route, key, rate)
-> a handler in the module of its resource -> `reply`. What can be asked is declared once, in
`operations`; the router, the OpenAPI document and the reference page are made from there.
Errors become problem documents in `problems`, and nowhere else.
"""
