"""A seccomp profile compiled once, for crun, which takes the result as it is.

Compiling takes milliseconds, a good part of what starting a container takes. It is done by the
library that the runtimes themselves use; the result also looks a call up faster, as a tree.
"""

from __future__ import annotations

import base64
import ctypes
import os
from collections.abc import Mapping
from typing import Any

ANNOTATION = "run.oci.seccomp_bpf_data"

_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_OPTIMIZE, _TREE = 8, 2
_COMPARE = {"SCMP_CMP_EQ": 4, "SCMP_CMP_MASKED_EQ": 7}
_ONE_FILTER = 8
"""Bytes of one instruction."""


class _Comparison(ctypes.Structure):
    _fields_ = (
        ("arg", ctypes.c_uint),
        ("op", ctypes.c_int),
        ("a", ctypes.c_uint64),
        ("b", ctypes.c_uint64),
    )


def compiled(profile: Mapping[str, Any]) -> str:
    """For this machine, in base64; empty if that can't be done here."""
    try:
        library = ctypes.CDLL("libseccomp.so.2")
    except OSError:
        return ""
    library.seccomp_init.restype = ctypes.c_void_p
    library.seccomp_init.argtypes = [ctypes.c_uint32]
    context = library.seccomp_init(_ERRNO | profile["defaultErrnoRet"])
    if not context:
        return ""
    try:
        return _compile(library, ctypes.c_void_p(context), profile)
    finally:
        library.seccomp_release(ctypes.c_void_p(context))


def _compile(library: ctypes.CDLL, context: ctypes.c_void_p, profile: Mapping[str, Any]) -> str:
    # An older library knows no tree; a list does the same.
    library.seccomp_attr_set(context, _OPTIMIZE, _TREE)
    for rule in profile["syscalls"]:
        for name in rule["names"]:
            number = library.seccomp_syscall_resolve_name(name.encode())
            # Negative is a call that this architecture, or this library, does not have.
            if number >= 0 and not _add(library, context, number, rule):
                return ""
    return _exported(library, context)


def _add(
    library: ctypes.CDLL, context: ctypes.c_void_p, number: int, rule: Mapping[str, Any]
) -> bool:
    action = _ALLOW if rule["action"] == "SCMP_ACT_ALLOW" else _ERRNO | rule["errnoRet"]
    args = rule.get("args", ())
    comparisons = (_Comparison * max(len(args), 1))(
        *(
            _Comparison(arg["index"], _COMPARE[arg["op"]], arg["value"], arg.get("valueTwo", 0))
            for arg in args
        )
    )
    add = library.seccomp_rule_add_array
    add.argtypes = [ctypes.c_void_p, ctypes.c_uint32, ctypes.c_int, ctypes.c_uint, ctypes.c_void_p]
    return bool(add(context, action, number, len(args), ctypes.byref(comparisons)) == 0)


def _exported(library: ctypes.CDLL, context: ctypes.c_void_p) -> str:
    file = os.memfd_create("penstock-seccomp")
    try:
        if library.seccomp_export_bpf(context, file) != 0:
            return ""
        size = os.lseek(file, 0, os.SEEK_END)
        data = os.pread(file, size, 0)
    finally:
        os.close(file)
    return base64.b64encode(data).decode() if data and size % _ONE_FILTER == 0 else ""
