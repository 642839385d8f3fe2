"""Linux' means of isolation, called directly: namespaces, mounts, Landlock, limits."""

from __future__ import annotations

import ctypes
import os
import resource
import stat
from collections.abc import Iterable, Sequence

from groupwise.graders.sandbox.inside import filter as seccomp

CLONE_NEWNS, CLONE_NEWCGROUP, CLONE_NEWUTS = 0x00020000, 0x02000000, 0x04000000
CLONE_NEWIPC, CLONE_NEWUSER, CLONE_NEWPID = 0x08000000, 0x10000000, 0x20000000
CLONE_NEWNET = 0x40000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC = 1, 2, 4, 8
MS_BIND, MS_REC, MS_PRIVATE = 4096, 16384, 1 << 18
MNT_DETACH, AT_FDCWD, AT_RECURSIVE = 2, -100, 0x8000
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 1, 4, 22, 38
PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
CAPSET = {"x86_64": 126, "aarch64": 91}
MOUNT_SETATTR, LANDLOCK_CREATE, LANDLOCK_ADD, LANDLOCK_RESTRICT = 442, 444, 445, 446

READ = 1 << 0 | 1 << 2 | 1 << 3  # Landlock's rights: execute, read a file, list a folder
OF_A_FILE = 1 << 0 | 1 << 1 | 1 << 2 | 1 << 14 | 1 << 15
WRITE_A_FILE = 1 << 1
NOBODY = 65534

libc = ctypes.CDLL(None, use_errno=True)


def _done(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def _call(what: str, number: int, *arguments: object) -> int:
    return _done(libc.syscall(ctypes.c_long(number), *arguments), what)


def machine() -> str:
    return os.uname().machine


def unshare(flags: int) -> None:
    _done(libc.unshare(flags), "new namespaces")


def prctl(option: int, value: int) -> None:
    zero = ctypes.c_ulong(0)
    _done(libc.prctl(option, ctypes.c_ulong(value), zero, zero, zero), f"prctl {option}")


def mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    result = libc.mount(
        source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), options.encode()
    )
    _done(result, f"mount {target}")


def read_only(path: str, deep: bool) -> None:
    """Turn what is mounted here, and with `deep` below, read-only for good."""

    class Attributes(ctypes.Structure):
        _fields_ = [(name, ctypes.c_uint64) for name in ("set", "clear", "spread", "user")]

    wanted = Attributes(set=MS_RDONLY | MS_NOSUID)
    _call(
        f"mount {path} read-only",
        MOUNT_SETATTR,
        AT_FDCWD,
        path.encode(),
        AT_RECURSIVE if deep else 0,
        ctypes.byref(wanted),
        ctypes.c_size_t(ctypes.sizeof(wanted)),
    )


def map_own_id(uid: int, gid: int) -> None:
    """Keep the own user number in a new user namespace, without others. Nobody is called root."""
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{uid or NOBODY} {uid} 1"),
        ("gid_map", f"{gid or NOBODY} {gid} 1"),
    ):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)


def become(uid: int) -> None:
    """Give up root for good."""
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    prctl(PR_SET_DUMPABLE, 1)  # else its own /proc/self belongs to root


def build_root(folders: Sequence[str], files: Sequence[str], devices: Sequence[str]) -> None:
    """Build a root of nothing but these, read-only, with /proc and an empty /tmp; enter it.

    The process has a mount namespace and a process namespace of its own.
    """
    sources = {path: os.open(path, os.O_PATH) for path in [*folders, *files, *devices]}
    links = [(path, os.readlink(path)) for path in ("/lib", "/lib64", "/bin") if _is_link(path)]
    mount("none", "/", "", MS_REC | MS_PRIVATE)
    new = "/tmp"
    mount("tmpfs", new, "tmpfs", MS_NOSUID | MS_NODEV, "size=1m,mode=0755")
    for name in ("/proc", "/tmp"):
        os.mkdir(new + name)
    for path, source in sources.items():
        if path in folders:
            os.makedirs(new + path, exist_ok=True)
        else:
            os.makedirs(os.path.dirname(new + path), exist_ok=True)
            os.close(os.open(new + path, os.O_CREAT | os.O_WRONLY, 0o644))
        mount(f"/proc/self/fd/{source}", new + path, "", MS_BIND | MS_REC)
        if path not in devices:
            read_only(new + path, deep=True)
        os.close(source)
    for path, target in links:
        os.symlink(target, new + path)
    mount("proc", new + "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    os.chdir(new)
    _call("pivot_root", PIVOT_ROOT[machine()], b".", b".")
    _done(libc.umount2(b".", MNT_DETACH), "leave the old root")
    os.chdir("/")
    read_only("/", deep=False)


def _is_link(path: str) -> bool:
    return os.path.lexists(path) and stat.S_ISLNK(os.lstat(path).st_mode)


def landlock_version() -> int:
    """Return 0 where the kernel has no Landlock, or where it is switched off."""
    found: int = libc.syscall(ctypes.c_long(LANDLOCK_CREATE), None, ctypes.c_size_t(0), 1)
    return max(found, 0)


def landlock(readable: Iterable[str], devices: Iterable[str], writable: Iterable[str]) -> None:
    """Allow from now on: read these, write those, no other file; no TCP, no signals outside."""
    version = landlock_version()
    everything = (1 << (13 + (version >= 2) + (version >= 3))) - 1 | (1 << 15) * (version >= 5)
    handled = [everything]
    if version >= 4:
        handled.append(0b11)  # TCP: bind, connect
    if version >= 6:
        handled.append(0b11)  # abstract sockets and signals
    attributes = (ctypes.c_uint64 * len(handled))(*handled)
    size = ctypes.c_size_t(ctypes.sizeof(attributes))
    rules = _call("Landlock", LANDLOCK_CREATE, ctypes.byref(attributes), size, 0)
    rights = [(path, READ) for path in readable] + [(path, everything) for path in writable]
    rights += [(path, READ | WRITE_A_FILE) for path in devices]
    for path, allowed in rights:
        _allow(rules, path, allowed & everything)
    _call("Landlock", LANDLOCK_RESTRICT, rules, 0)
    os.close(rules)


def _allow(rules: int, path: str, allowed: int) -> None:
    class Beneath(ctypes.Structure):
        _pack_ = 1
        _fields_ = [("allowed", ctypes.c_uint64), ("parent", ctypes.c_int32)]

    place = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        if not stat.S_ISDIR(os.fstat(place).st_mode):
            allowed &= OF_A_FILE
        beneath = Beneath(allowed, place)
        _call(f"Landlock {path}", LANDLOCK_ADD, rules, 1, ctypes.byref(beneath), 0)
    finally:
        os.close(place)


def set_limits(
    memory: int, file_size: int, seconds: int, processes: int | None, files: int
) -> None:
    for kind, value in (
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_FSIZE, file_size),
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_NPROC, processes),
        (resource.RLIMIT_NOFILE, files),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
    ):
        if value is None:
            continue
        hard = resource.getrlimit(kind)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))


def drop_capabilities() -> None:
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    nothing = (ctypes.c_uint32 * 6)()
    _call("capset", CAPSET[machine()], ctypes.byref(header), ctypes.byref(nothing))


def no_new_privileges() -> None:
    prctl(PR_SET_NO_NEW_PRIVS, 1)


def refuse_calls(may_fork: bool, sees_others: bool) -> None:
    program = seccomp.build(may_fork, sees_others)
    pointer = ctypes.addressof(program)
    _done(libc.prctl(PR_SET_SECCOMP, ctypes.c_ulong(2), ctypes.c_void_p(pointer)), "seccomp")
