"""Wires settings into a running system; the only package that names adapters."""

from penstock.app.application import App, Session, connect, load_app
from penstock.app.client import Client, JobHandle

__all__ = ["App", "Client", "JobHandle", "Session", "connect", "load_app"]
