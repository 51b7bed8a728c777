"""Containers without a daemon: a bundle for `runc`, `crun` or `runsc`, and a store of images.

A container is a folder `live/run/<name>` below the engine's root: its bundle (`config.json`), its
spec, two FIFOs for what it writes, and files in which a small shell process, the launcher,
tells its own PID and, at the end, the runtime's exit code. The launcher has a session of its
own and holds the FIFOs open, so a worker may die and another take over: the container waits
when the FIFOs are full, and no byte and no exit code is lost. `live` is in memory where the machine
allows it: no container outlives the machine.

The root file system of an image is one folder that all its containers share, read-only. One that
may write has a layer above it, in `layers/<name>`, on disk.
"""
