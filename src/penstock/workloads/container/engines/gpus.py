"""The GPUs of this machine, as container engines find them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

NONE = (
    "this machine has no GPU that containers could use: install the driver and the NVIDIA Container"
    " Toolkit"
)
NO_CDI = "no GPU is described in /etc/cdi or /run/cdi: run nvidia-ctk cdi generate"
_FOLDERS = ("/etc/cdi", "/run/cdi", "/var/run/cdi")
_DEVICES = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")


def has_device() -> bool:
    return any(Path(path).exists() for path in _DEVICES) or cdi_kind() != ""


def cdi_kind() -> str:
    """What the specifications of the Container Device Interface call GPUs, as `nvidia.com/gpu`;
    empty if there is none."""
    for folder in _FOLDERS:
        for path in sorted(Path(folder).glob("*")):
            if path.suffix in (".json", ".yaml", ".yml") and (kind := _kind(path)):
                return kind
    return ""


def _kind(path: Path) -> str:
    try:
        found: Any = yaml.safe_load(path.read_text())  # JSON is YAML, too
        kind = str(found["kind"])
    except (OSError, UnicodeDecodeError, yaml.YAMLError, KeyError, TypeError):
        return ""
    return kind if kind.endswith("/gpu") else ""
