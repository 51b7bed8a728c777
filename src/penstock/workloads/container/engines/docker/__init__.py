"""Docker's engine API, which Podman speaks too, over a Unix socket."""
