"""Two things that only the kernel can do, and Python does not ask it for."""

from __future__ import annotations

import ctypes
import errno
import os
import sys
from functools import cache
from pathlib import Path
from typing import Any

_AT_FDCWD = -100
_NOREPLACE = 1
_EXCL = 4
"""The same on macOS."""
_UNSUPPORTED = {errno.ENOSYS, errno.EINVAL, errno.ENOTSUP}


def rename_exclusively(source: Path, target: Path) -> None:
    """FileExistsError if the target is there, FileNotFoundError if the source is not."""
    code = _rename(os.fsencode(source), os.fsencode(target))
    if code in _UNSUPPORTED:
        _rename_after_a_look(source, target)
    elif code in (errno.EEXIST, errno.ENOTEMPTY):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target))
    elif code:
        raise OSError(code, os.strerror(code), str(source), None, str(target))


def can_flush_file_systems() -> bool:
    return _library("syncfs") is not None


def flush_file_system(handle: int) -> None:
    """All of the file system that this open folder is on; OSError if something was lost."""
    if _library("syncfs")(handle):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def _rename(source: bytes, target: bytes) -> int:
    if sys.platform == "darwin":
        call, words = _library("renamex_np"), (source, target, ctypes.c_uint(_EXCL))
    else:
        words = (_AT_FDCWD, source, _AT_FDCWD, target, ctypes.c_uint(_NOREPLACE))
        call = _library("renameat2")
    if call is None:
        return errno.ENOSYS
    return ctypes.get_errno() if call(*words) else 0


@cache
def _library(name: str) -> Any:
    """A call of the C library; None where there is no such thing."""
    return getattr(ctypes.CDLL(None, use_errno=True), name, None)


def _rename_after_a_look(source: Path, target: Path) -> None:
    """For old kernels and some file systems. A folder with something in it can't be replaced by
    a rename anyway; one that is empty can, between the look and the rename."""
    if os.path.lexists(target):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target))
    try:
        os.rename(source, target)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.ENOTDIR, errno.EISDIR):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target)) from error
        raise
