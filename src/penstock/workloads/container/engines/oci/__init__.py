"""Containers without a daemon: a bundle for `runc`, `crun` or `runsc`, and a store of images.

A container is a folder `live/run/<name>` below the engine's root, with its bundle (`config.json`)
and its spec. One small process for all containers, the shim, starts them and outlives the worker:
it holds what they write and their exit codes for the next one. `live` is in memory where the
machine allows it: no container outlives the machine.

The root file system of an image is one folder that all its containers share, read-only. One that
may write has a layer above it, in `layers/<name>`, on disk.
"""
