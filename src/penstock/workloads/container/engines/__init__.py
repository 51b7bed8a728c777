"""Engines, side by side: `docker` (also Podman's), and `oci` (runc, crun, runsc)."""
