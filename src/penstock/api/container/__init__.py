"""The HTTP API of a standalone container worker.

The protocol's endpoints, statuses, keys and their order are kept (docs/reference/containers.md);
what is new comes after them. Each module has the operations of one resource; `server` makes one
table of them for the machinery in `penstock.api`.
"""
