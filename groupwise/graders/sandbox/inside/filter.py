"""System calls that no program under test needs, refused by the kernel (seccomp)."""

from __future__ import annotations

import ctypes
import os
import platform

EPERM, ENOSYS = 1, 38
ALLOW, REFUSE, KILL = 0x7FFF0000, 0x00050000, 0x80000000  # what a filter returns
LOAD, EQUAL, AT_LEAST, ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06  # classic BPF
AND = 0x54
NUMBER, ARCHITECTURE, FIRST_ARGUMENT, SECOND_ARGUMENT = 0, 4, 16, 24  # in struct seccomp_data
CLONE_THREAD = 0x00010000
NEW_NAMESPACES = 0x7E020080  # every CLONE_NEW... flag
LAST_KNOWN = 450  # later calls have the same number everywhere; what they do is not known here
ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
X32 = 0x40000000

# Name, number on x86_64, number on aarch64 ("-": there is none). Next to mounting, tracing and
# keys: what Landlock does not cover (owners, modes, times, attributes, UNIX sockets), memory that
# no limit counts or that others share (memfd, System V), and what names another process.
CALLS = """
acct 163 89; add_key 248 217; adjtimex 159 171; bind 49 200; bpf 321 280; chmod 90 -; chown 92 -
chroot 161 51; clock_adjtime 305 266; clock_settime 227 112; connect 42 203; delete_module 176 106
fanotify_init 300 262; fchmod 91 52; fchmodat 268 53; fchown 93 55; fchownat 260 54
finit_module 313 273; fremovexattr 199 16; fsconfig 431 431; fsetxattr 190 7; fsmount 432 432
fsopen 430 430; fspick 433 433; futimesat 261 -; init_module 175 105; inotify_add_watch 254 27
io_uring_enter 426 426; io_uring_register 427 427; io_uring_setup 425 425; ioperm 173 -; iopl 172 -
ioprio_set 251 30; kcmp 312 272; kexec_file_load 320 294; kexec_load 246 104; keyctl 250 219
lchown 94 -; listen 50 201; lookup_dcookie 212 18; lremovexattr 198 15; lsetxattr 189 6
mbind 237 235; memfd_create 319 279; memfd_secret 447 447; migrate_pages 256 238; mknod 133 -
mknodat 259 33; modify_ldt 154 -; mount 165 40; mount_setattr 442 442; move_mount 429 429
move_pages 279 239; mq_open 240 180; mq_unlink 241 181; msgctl 71 187; msgget 68 186; msgrcv 70 188
msgsnd 69 189; name_to_handle_at 303 264; nfsservctl 180 42; open_by_handle_at 304 265
open_tree 428 428; perf_event_open 298 241; personality 135 92; pidfd_getfd 438 438
pidfd_open 434 434; pidfd_send_signal 424 424; pivot_root 155 41; process_madvise 440 440
process_mrelease 448 448; process_vm_readv 310 270; process_vm_writev 311 271; ptrace 101 117
quotactl 179 60; quotactl_fd 443 443; reboot 169 142; removexattr 197 14; request_key 249 218
rt_sigqueueinfo 129 138; rt_tgsigqueueinfo 297 240; sched_setattr 314 274; sched_setparam 142 118
sched_setscheduler 144 119; semctl 66 191; semget 64 190; semop 65 193; semtimedop 220 192
setdomainname 171 162; sethostname 170 161; setns 308 268; setpriority 141 140; settimeofday 164 170
setxattr 188 5; shmat 30 196; shmctl 31 195; shmget 29 194; socket 41 198; swapoff 168 225
swapon 167 224; sync 162 81; syncfs 306 267; syslog 103 116; tkill 200 130; truncate 76 45
umount2 166 39; unshare 272 97; userfaultfd 323 282; utime 132 -; utimensat 280 88; utimes 235 -
vhangup 153 58
"""
FORKS = "fork 57 -; vfork 58 -"
# Whom a descriptor's signals go to, and who waits for it: F_SETOWN, F_SETSIG, F_SETOWN_EX,
# F_SETLEASE.
FCNTL, FCNTL_REFUSED = "fcntl 72 25", (8, 10, 15, 1024)
# Those of terminals and of descriptors alone: others change files that may only be read.
IOCTL, IOCTL_KIND = "ioctl 16 29", 0x5400
PRCTL, PR_SET_PDEATHSIG = "prctl 157 167", 1  # a cell ends with its keeper, whatever it wants
SOCKETPAIR, SOCK_STREAM = (
    "socketpair 53 199",
    1,
)  # of streams alone: a datagram could be sent to any address
CLONE, CLONE3 = "clone 56 220", "clone3 435 435"  # clone3 hides its flags: glibc then takes clone
# Their first argument is a process: this one alone, where others could be named.
OF_A_PROCESS = "kill 62 129; tgkill 234 131; prlimit64 302 261; sched_setaffinity 203 122"


class Instruction(ctypes.Structure):
    _fields_ = [
        ("code", ctypes.c_uint16),
        ("jump_true", ctypes.c_uint8),
        ("jump_false", ctypes.c_uint8),
        ("value", ctypes.c_uint32),
    ]


class Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_uint16), ("first", ctypes.POINTER(Instruction))]


def build(may_fork: bool, sees_others: bool) -> Program:
    """Build a filter for this process.

    With `sees_others` no process namespace hides those outside, so that none may be named.
    """
    machine = platform.machine()
    rows = [
        (LOAD, 0, 0, ARCHITECTURE),
        (EQUAL, 1, 0, ARCHITECTURES[machine]),
        (RETURN, 0, 0, KILL),
        (LOAD, 0, 0, NUMBER),
    ]
    if machine == "x86_64":
        rows += [(AT_LEAST, 0, 1, X32), (RETURN, 0, 0, KILL)]
    rows += [(AT_LEAST, 0, 1, LAST_KNOWN + 1), (RETURN, 0, 0, REFUSE | ENOSYS)]
    for number in numbers(CALLS, machine) + ([] if may_fork else numbers(FORKS, machine)):
        rows += [(EQUAL, 0, 1, number), (RETURN, 0, 0, REFUSE | EPERM)]
    rows += [(EQUAL, 0, 1, numbers(CLONE3, machine)[0]), (RETURN, 0, 0, REFUSE | ENOSYS)]
    rows += _without(numbers(FCNTL, machine)[0], SECOND_ARGUMENT, FCNTL_REFUSED)
    rows += _without(numbers(PRCTL, machine)[0], FIRST_ARGUMENT, (PR_SET_PDEATHSIG,))
    rows += _only(numbers(IOCTL, machine)[0], 0xFFFFFF00, IOCTL_KIND)
    rows += _only(numbers(SOCKETPAIR, machine)[0], 0xF, SOCK_STREAM)
    rows += _clone(numbers(CLONE, machine)[0], may_fork)
    if sees_others:
        for number in numbers(OF_A_PROCESS, machine):
            rows += _of_itself(number)
    rows.append((RETURN, 0, 0, ALLOW))
    return Program(len(rows), (Instruction * len(rows))(*(Instruction(*row) for row in rows)))


def numbers(table: str, machine: str) -> list[int]:
    column = 1 if machine == "x86_64" else 2
    found = [
        entry.split()[column] for entry in table.replace("\n", ";").split(";") if entry.strip()
    ]
    return [int(number) for number in found if number != "-"]


def _clone(number: int, may_fork: bool) -> list[tuple[int, int, int, int]]:
    """Allow no namespaces, and no processes but threads unless forking is allowed."""
    return [
        (EQUAL, 0, 6, number),
        (LOAD, 0, 0, FIRST_ARGUMENT),
        (ANY_BIT, 0, 1, NEW_NAMESPACES),
        (RETURN, 0, 0, REFUSE | EPERM),
        (ANY_BIT, 1, 0, CLONE_THREAD),
        (RETURN, 0, 0, ALLOW if may_fork else REFUSE | EPERM),
        (RETURN, 0, 0, ALLOW),
    ]


def _without(
    number: int, argument: int, commands: tuple[int, ...]
) -> list[tuple[int, int, int, int]]:
    """Refuse a call with one of these arguments."""
    rows = [(EQUAL, 0, 2 * len(commands) + 2, number), (LOAD, 0, 0, argument)]
    for command in commands:
        rows += [(EQUAL, 0, 1, command), (RETURN, 0, 0, REFUSE | EPERM)]
    return [*rows, (RETURN, 0, 0, ALLOW)]


def _only(number: int, bits: int, value: int) -> list[tuple[int, int, int, int]]:
    """Allow a call whose second argument has this value in these bits."""
    return [
        (EQUAL, 0, 5, number),
        (LOAD, 0, 0, SECOND_ARGUMENT),
        (AND, 0, 0, bits),
        (EQUAL, 1, 0, value),
        (RETURN, 0, 0, REFUSE | EPERM),
        (RETURN, 0, 0, ALLOW),
    ]


def _of_itself(number: int) -> list[tuple[int, int, int, int]]:
    """Allow a call on this process alone; 0 is itself, or its group, which is its own."""
    return [
        (EQUAL, 0, 5, number),
        (LOAD, 0, 0, FIRST_ARGUMENT),
        (EQUAL, 2, 0, os.getpid()),
        (EQUAL, 1, 0, 0),
        (RETURN, 0, 0, REFUSE | EPERM),
        (RETURN, 0, 0, ALLOW),
    ]
