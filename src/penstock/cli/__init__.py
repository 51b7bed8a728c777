"""The command line: `penstock`, one module per command or pair of commands.

A command's module is imported when the command is called, so `penstock --help` stays light.
"""

from __future__ import annotations


def main() -> None:
    """The entry point."""
    import sys

    from penstock.cli.program import run

    sys.exit(run(sys.argv[1:]))
