"""Folders of containers that are no more, until they are deleted."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from penstock.workloads.container.files.clearing import remove_tree


class Gone:
    """`gone/`. One rename takes a folder out of `run/`: a container is there with its note, or it
    is not there at all, at whatever moment a worker dies. What is in here is nobody's."""

    def __init__(self, place: Path) -> None:
        self._place = place
        place.mkdir(parents=True, exist_ok=True, mode=0o700)

    def discard(self, folder: Path) -> None:
        """Raises OSError; once it is out of its place, `clear` does the rest."""
        # The same name may be made and removed again before the first is deleted.
        there = self._place / f"{folder.name}.{secrets.token_hex(4)}"
        try:
            os.rename(folder, there)
        except FileNotFoundError:
            return
        remove_tree(there)

    def clear(self) -> None:
        """Delete what others did not. Raises OSError, after what can be deleted was."""
        failed: list[OSError] = []
        for path in sorted(self._place.iterdir()):
            try:
                remove_tree(path)
            except OSError as error:
                failed.append(error)
        if failed:
            raise failed[0]
