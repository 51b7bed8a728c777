"""Which system calls a container may make: a list of what is allowed, for any runtime that
keeps to the OCI specification, and (the same form) for engines that take a profile.

A program gets ENOSYS for what is not listed, as from a kernel that does not have it: libraries
know what to do then. Calls that are well known and refused on purpose answer EPERM.
Programs of another architecture than the machine's (32-bit ones too) don't run at all.
"""

from __future__ import annotations

import base64
import ctypes
import errno
import os
import platform
import socket
from collections.abc import Iterable, Mapping
from typing import Any

_NAMESPACES = 0x7E020000
"""CLONE_NEWNS, CGROUP, UTS, IPC, USER, PID and NET."""
_NEW_TIME = 0x80
"""CLONE_NEWTIME; with clone (not unshare) these bits mean a signal."""

_ARCHITECTURES = {
    "x86_64": "SCMP_ARCH_X86_64",
    "amd64": "SCMP_ARCH_X86_64",
    "aarch64": "SCMP_ARCH_AARCH64",
    "arm64": "SCMP_ARCH_AARCH64",
}

_FILES = """
    access chdir chmod chown close close_range copy_file_range creat dup dup2 dup3 faccessat
    faccessat2 fadvise64 fallocate fchdir fchmod fchmodat fchmodat2 fchown fchownat fcntl
    fdatasync fgetxattr flistxattr flock fremovexattr fsetxattr fstat fstatfs fsync ftruncate
    futimesat getcwd getdents getdents64 getxattr inotify_add_watch inotify_init inotify_init1
    inotify_rm_watch ioctl lchown lgetxattr link linkat listxattr llistxattr lremovexattr lseek
    lsetxattr lstat mkdir mkdirat mknod mknodat newfstatat open openat openat2 pipe pipe2 pread64
    preadv preadv2 pwrite64 pwritev pwritev2 read readahead readlink readlinkat readv removexattr
    rename renameat renameat2 rmdir sendfile setxattr splice stat statfs statx symlink symlinkat
    sync sync_file_range syncfs tee truncate umask unlink unlinkat utime utimensat utimes vmsplice
    write writev cachestat
"""
_MEMORY = """
    brk madvise map_shadow_stack membarrier memfd_create mincore mlock mlock2 mlockall mmap
    mprotect mremap msync munlock munlockall munmap pkey_alloc pkey_free pkey_mprotect
    process_mrelease remap_file_pages mseal
"""
_PROCESSES = """
    alarm arch_prctl capget capset execve execveat exit exit_group fork futex futex_requeue
    futex_wait futex_waitv futex_wake get_robust_list get_thread_area getcpu getegid geteuid
    getgid getgroups getitimer getpgid getpgrp getpid getppid getpriority getresgid getresuid
    getrlimit getrusage getsid gettid getuid ioprio_get ioprio_set kill landlock_add_rule
    landlock_create_ruleset landlock_restrict_self pause pidfd_open pidfd_send_signal prctl
    prlimit64 restart_syscall rseq rt_sigaction rt_sigpending rt_sigprocmask rt_sigqueueinfo
    rt_sigreturn rt_sigsuspend rt_sigtimedwait rt_tgsigqueueinfo sched_get_priority_max
    sched_get_priority_min sched_getaffinity sched_getattr sched_getparam sched_getscheduler
    sched_rr_get_interval sched_setaffinity sched_setattr sched_setparam sched_setscheduler
    sched_yield seccomp set_robust_list set_thread_area set_tid_address setfsgid setfsuid setgid
    setgroups setitimer setpgid setpriority setregid setresgid setresuid setreuid setrlimit
    setsid setuid sigaltstack signalfd signalfd4 sysinfo tgkill time times tkill uname vfork
    wait4 waitid getrandom
"""
_TIME = """
    clock_getres clock_gettime clock_nanosleep gettimeofday nanosleep timer_create timer_delete
    timer_getoverrun timer_gettime timer_settime timerfd_create timerfd_gettime timerfd_settime
"""
_TALK = """
    accept accept4 bind connect epoll_create epoll_create1 epoll_ctl epoll_ctl_old epoll_pwait
    epoll_pwait2 epoll_wait epoll_wait_old eventfd eventfd2 getpeername getsockname getsockopt
    io_cancel io_destroy io_getevents io_pgetevents io_setup io_submit listen mq_getsetattr
    mq_notify mq_open mq_timedreceive mq_timedsend mq_unlink msgctl msgget msgrcv msgsnd poll
    ppoll pselect6 recvfrom recvmmsg recvmsg select semctl semget semop semtimedop sendmmsg
    sendmsg sendto setsockopt shmat shmctl shmdt shmget shutdown socketpair
"""
_ALLOWED = (_FILES, _MEMORY, _PROCESSES, _TIME, _TALK)

_REFUSED = """
    acct add_key adjtimex bpf chroot clock_adjtime clock_settime delete_module fanotify_init
    finit_module fsconfig fsmount fsopen fspick init_module io_uring_enter io_uring_register
    io_uring_setup ioperm iopl kcmp kexec_file_load kexec_load keyctl lookup_dcookie mount
    mount_setattr move_mount name_to_handle_at open_by_handle_at open_tree perf_event_open
    pidfd_getfd pivot_root process_vm_readv process_vm_writev ptrace quotactl quotactl_fd reboot
    request_key setdomainname sethostname setns settimeofday swapoff swapon syslog umount
    umount2 userfaultfd vhangup
"""

_FAMILIES = (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6, socket.AF_NETLINK)
_PERSONALITIES = (0, 8, 0xFFFFFFFF)


def profile(machine: str = "") -> dict[str, Any]:
    """`linux.seccomp` of a bundle for a machine such as `x86_64`; this one, if none is named."""
    return {
        "defaultAction": "SCMP_ACT_ERRNO",
        "defaultErrnoRet": errno.ENOSYS,
        "architectures": [_ARCHITECTURES[machine or platform.machine()]],
        "syscalls": [
            _allow(" ".join(_ALLOWED).split()),
            *(_allow_if("socket", 0, family) for family in _FAMILIES),
            *(_allow_if("personality", 0, value) for value in _PERSONALITIES),
            _allow_without("clone", _NAMESPACES),
            _allow_without("unshare", _NAMESPACES | _NEW_TIME),
            {"names": _REFUSED.split(), "action": "SCMP_ACT_ERRNO", "errnoRet": errno.EPERM},
        ],
    }


def _allow(names: Iterable[str]) -> dict[str, Any]:
    return {"names": list(names), "action": "SCMP_ACT_ALLOW"}


def _allow_if(name: str, index: int, value: int) -> dict[str, Any]:
    argument = {"index": index, "value": int(value), "op": "SCMP_CMP_EQ"}
    return {"names": [name], "action": "SCMP_ACT_ALLOW", "args": [argument]}


def _allow_without(name: str, flags: int) -> dict[str, Any]:
    """None of these bits may be set in the first argument."""
    argument = {"index": 0, "value": flags, "valueTwo": 0, "op": "SCMP_CMP_MASKED_EQ"}
    return {"names": [name], "action": "SCMP_ACT_ALLOW", "args": [argument]}


# -- compiled -------------------------------------------------------------------

ANNOTATION = "run.oci.seccomp_bpf_data"
"""By which crun takes a compiled profile; otherwise it compiles it at every start."""

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
