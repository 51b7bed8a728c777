"""What a plug-in's or an application's author can use without pytest."""

from __future__ import annotations

import subprocess
import sys

import penstock.testing

MODULES = ("aio", "clock", "context", "executor", "images", "in_memory", "samples")


def test_the_test_kit_can_be_imported_without_pytest() -> None:
    code = (
        "import sys\n"
        "sys.modules['pytest'] = sys.modules['hypothesis'] = None\n"
        "from importlib import import_module\n"
        f"for name in {MODULES}: import_module('penstock.testing.' + name)\n"
        "import penstock.testing\n"
        f"for name in {penstock.testing.__all__}: getattr(penstock.testing, name)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
