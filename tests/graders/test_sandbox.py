"""Programs that try to get out, to stay, or to use more than their share."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from pathlib import Path

import pytest

from groupwise.graders.sandbox import attacks, isolation, pool
from groupwise.graders.sandbox.isolation import TRUST, WALLS, SandboxError
from groupwise.graders.sandbox.limits import Limits
from groupwise.graders.sandbox.pool import SandboxPool, choose, problem
from groupwise.graders.sandbox.worker import Sandbox

LIMITS = Limits(seconds=10, memory=256, disk=8, output=64)
NESTED = ("bubblewrap", "namespaces")
THROUGH = "through"


@pytest.fixture(scope="module", params=WALLS)
def worker(request):
    if why := problem(request.param):
        pytest.skip(why)  # this machine does not offer it
    found = Sandbox(request.param, slot=7)
    yield found
    found.close()


def run(worker, code, stdin="", limits=LIMITS):
    return worker.script(textwrap.dedent(code), stdin, limits)


def test_a_harmless_program_runs(worker):
    ran = run(worker, "print(int(input()) * 2)", "21\n")
    assert (ran.output, ran.why) == ("42\n", "")


def test_a_program_ends_with_its_threads_and_what_it_left_for_the_end(worker):
    code = """
        import atexit, sys, threading, time
        atexit.register(print, "last")
        def main():
            time.sleep(0.05)
            print("thread")
        threading.stack_size(2**26)
        threading.Thread(target=main).start()
        sys.exit(%d)
    """
    assert run(worker, code % 0).output == "thread\nlast\n"
    ran = run(worker, code % 3)
    assert (ran.output, ran.why) == ("thread\nlast\n", "exit status 3")


def test_it_reads_no_file_of_the_machine(worker, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("s3cret")
    for path in (tmp_path, *tmp_path.parents):
        if path.stat().st_uid == os.getuid() and path != Path("/") and path != Path("/tmp"):
            path.chmod(0o755)
    code = f"""
        import os
        for path in ({str(secret)!r}, "/etc/passwd", "/etc/hostname", "/proc/1/environ",
                     "/proc/self/environ", "/proc/self/mem", "/sys/kernel/uevent_seqnum"):
            try:
                print("{THROUGH}", path, open(path, "rb").read(8))
            except OSError:
                pass
        if os.path.lexists("link"): print("{THROUGH}")
        try:
            os.symlink({str(secret)!r}, "link")
            print("{THROUGH}", open("link").read())
        except OSError:
            pass
        print("done")
    """
    assert run(worker, code).output == "done\n"


def test_it_writes_nothing_outside_its_scratch(worker, tmp_path):
    tmp_path.chmod(0o777)
    (tmp_path / "target").write_text("kept")
    (tmp_path / "target").chmod(0o666)
    code = f"""
        import os, pathlib
        places = [{str(tmp_path)!r}, "/", "/usr", "/usr/lib", "/var/tmp", "/dev/shm", "/proc/self"]
        for place in places:
            try:
                pathlib.Path(place, "written").write_text("x")
                print("{THROUGH}", place)
            except OSError:
                pass
        for act in (lambda p: os.truncate(p, 0), os.remove, lambda p: os.chmod(p, 0),
                    lambda p: os.utime(p, (0, 0)), lambda p: open(p, "w"),
                    lambda p: (os.symlink(p, "way"), open("way", "w"))):
            try:
                act({str(tmp_path / "target")!r})
                print("{THROUGH}")
            except OSError:
                pass
        print("done")
    """
    before = (tmp_path / "target").stat()
    assert run(worker, code).output == "done\n"
    after = (tmp_path / "target").stat()
    assert (tmp_path / "target").read_text() == "kept"
    assert (after.st_mode, after.st_mtime) == (before.st_mode, before.st_mtime)
    assert not (tmp_path / "written").exists()


@pytest.fixture
def open_folder():
    """That anybody may enter, with a short name: the address of a socket has 107 bytes."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        Path(folder).chmod(0o777)
        yield Path(folder)


def test_it_opens_no_connection(worker, open_folder):
    with socket.create_server(("127.0.0.1", 0)) as tcp, socket.socket(socket.AF_UNIX) as unix:
        unix.bind(str(open_folder / "socket"))
        unix.listen()
        (open_folder / "socket").chmod(0o777)
        code = f"""
            import socket
            for family, kind, address in (
                (socket.AF_INET, socket.SOCK_STREAM, ("127.0.0.1", {tcp.getsockname()[1]})),
                (socket.AF_INET, socket.SOCK_DGRAM, ("127.0.0.1", 53)),
                (socket.AF_INET6, socket.SOCK_STREAM, ("::1", {tcp.getsockname()[1]})),
                (socket.AF_UNIX, socket.SOCK_STREAM, {str(open_folder / "socket")!r}),
                (socket.AF_NETLINK, socket.SOCK_RAW, (0, 0)),
            ):
                try:
                    socket.socket(family, kind).connect(address)
                    print("{THROUGH}", family)
                except OSError:
                    pass
            left, right = socket.socketpair()   # asyncio needs one
            left.send(b"x")
            print(right.recv(1))
        """
        assert run(worker, code).output == "b'x'\n"


def test_it_sends_no_datagram(worker, open_folder):
    """Landlock does not keep UNIX sockets: a pair of datagram sockets reached any of them."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as mailbox:
        mailbox.bind(str(open_folder / "mailbox"))
        mailbox.setblocking(False)
        (open_folder / "mailbox").chmod(0o777)
        code = f"""
            import socket
            left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
            left.sendto(b"x", {str(open_folder / "mailbox")!r})
            print("{THROUGH}")
        """
        assert "PermissionError" in run(worker, code).why
        with pytest.raises(BlockingIOError):
            mailbox.recv(1)


def test_it_shares_no_memory_with_others(worker):
    code = """
        import ctypes
        libc = ctypes.CDLL(None, use_errno=True)
        calls = [(libc.shmget, 0, 4096, 0o1600), (libc.shmat, 0, None, 0), (libc.msgget, 0, 0o1600),
                 (libc.semget, 0, 1, 0o1600), (libc.shmctl, 0, 0, None)]
        for call, *given in calls:
            ctypes.set_errno(0)
            assert call(*given) == -1 and ctypes.get_errno() == 1, call
        print("done")
    """
    assert run(worker, code).output == "done\n"


def test_it_kills_traces_and_names_no_other_process(worker):
    victim = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        code = f"""
            import ctypes, os, resource, signal
            libc = ctypes.CDLL(None)
            for pid in ({victim.pid}, {os.getpid()}, os.getppid(), -1):
                if pid in (0, os.getpid()):
                    continue
                try:
                    os.kill(pid, signal.SIGKILL)
                    if pid != -1:  # of a process namespace's only process: harmless
                        print("{THROUGH}", pid)
                except OSError:
                    pass
                if pid > 0:
                    try:
                        resource.prlimit(pid, resource.RLIMIT_CORE, (0, 0))
                        print("{THROUGH}", pid)
                    except OSError:
                        pass
                    if libc.ptrace(16, pid, 0, 0) == 0:
                        print("{THROUGH}", pid)
            print("done")
        """
        assert run(worker, code).output == "done\n"
        assert victim.poll() is None
    finally:
        victim.kill()
        victim.wait()


def test_it_has_nobody_signalled_for_it(worker):
    """A descriptor's owner gets its signals, and any may be chosen: F_SETOWN and F_SETSIG."""
    code = """
        import fcntl, os, struct
        left, right = os.pipe()
        for command, value in ((8, 1), (10, 9), (15, struct.pack("ii", 1, 1))):
            try:
                fcntl.fcntl(left, command, value)
                print("through", command)
            except PermissionError:
                pass
        try:
            fcntl.ioctl(0, 0x8901, struct.pack("i", 1))
            print("through")
        except PermissionError:
            print(fcntl.fcntl(left, fcntl.F_GETFD))
    """
    assert run(worker, code).output == "1\n"


def test_it_changes_nothing_through_a_file_that_it_may_read(worker):
    """Flags of a file (FS_IOC_SETFLAGS), leases that make others wait, and who ends with whom."""
    code = """
        import ctypes, fcntl, os, struct, sys
        file = os.open(sys.executable, os.O_RDONLY)
        for act in (lambda: fcntl.ioctl(file, 0x40086602, struct.pack("l", 0x40)),
                    lambda: fcntl.fcntl(file, 1024, fcntl.F_RDLCK)):
            try:
                act()
                print("through")
            except OSError as error:
                print(error.errno)  # 13 would be the file's owner's mode, not the filter's doing
        print(ctypes.CDLL(None).prctl(1, 0, 0, 0, 0), os.isatty(0))
    """
    assert run(worker, code).output == "1\n1\n-1 False\n"


def test_a_sandbox_that_is_ended_from_outside_is_no_verdict(worker):
    """And the cell ends with it, though its leash is still held."""
    fresh = Sandbox(worker.wall, slot=14)
    name = f"held{os.getpid()}{worker.wall[:3]}"
    code = f"import ctypes, time\nctypes.CDLL(None).prctl(15, b'{name}')\ntime.sleep(60)"
    found = []

    def wait():
        with pytest.raises(SandboxError, match="from outside") as error:
            fresh.script(code, "", Limits(seconds=60))
        found.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    try:
        waited(lambda: named(name))
        os.kill(min(children(fresh.process.pid), default=fresh.process.pid), signal.SIGKILL)
        fresh.process.kill()
        thread.join(60)
        assert found
        waited(lambda: not named(name))
    finally:
        fresh.close()


def test_it_can_not_fork_unless_it_may(worker):
    ran = run(worker, "import os\nwhile True: os.fork()")
    assert "PermissionError" in ran.why
    threads = "import threading as t\nx = t.Thread(target=print, args=[1]); x.start(); x.join()"
    assert run(worker, threads).output == "1\n"


def test_a_fork_bomb_is_bounded_and_leaves_nothing(worker):
    if worker.wall not in NESTED:
        with pytest.raises(SandboxError, match="process namespace"):
            run(worker, "print(1)", limits=Limits(processes=4))
        return
    name = f"bomb{os.getpid()}{worker.wall[:3]}"
    code = f"""
        import ctypes, os, time
        ctypes.CDLL(None).prctl(15, {name.encode()!r}, 0, 0, 0)
        made = 0
        try:
            for _ in range(200):
                if os.fork() == 0:
                    os.setsid()
                    time.sleep(60)
                    os._exit(0)
                made += 1
        except OSError:
            pass
        print(made, flush=True)
    """
    ran = run(worker, code, limits=Limits(seconds=10, processes=4))
    assert 3 <= int(ran.output) <= 20
    assert named(name) == []  # daemons among them, as soon as the verdict is there


@pytest.mark.parametrize("child", ["sys.exit()", "raise ValueError", "return -1"])
def test_a_child_of_a_program_does_not_answer_for_it(worker, child):
    """It comes back out of the function, to a pipe that the tests listen on."""
    if worker.wall not in NESTED:
        return  # it can't fork
    code = f"""
import os, sys
def f(x):
    pid = os.fork()
    if pid == 0:
        {child}
    os.waitpid(pid, 0)
    return x
"""
    job = {
        "helpers": "",
        "names": ["f"],
        "classes": [],
        "setup": "",
        "tests": [f"assert f({n}) == {n}" for n in range(8)],
        "to_the_end": True,
    }
    found = worker.examine(code, job, Limits(seconds=10, processes=4))
    assert (found.passed, found.why) == (8, "")


def named(name):
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and (entry / "comm").read_text().strip() == name:
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def test_it_can_not_fill_the_disk(worker):
    code = """
        import os
        written = 0
        try:
            for number in range(100):
                with open(f"file{number}", "wb") as file:
                    written += file.write(b"x" * 2**20)
        except OSError:
            pass
        made = 0
        try:
            for number in range(100_000):
                os.close(os.open(f"empty{number}", os.O_CREAT | os.O_WRONLY))
                made += 1
        except OSError:
            pass
        print(written // 2**20, made)
    """
    written, made = map(int, run(worker, code).output.split())
    assert written <= LIMITS.disk and made < 5000
    assert (written > 0) == (worker.wall in NESTED)


def test_it_can_not_take_memory_without_end(worker):
    ran = run(worker, "x = []\nwhile True: x.append(bytearray(2**20))")
    assert "MemoryError" in ran.why
    ran = run(worker, "import mmap\nx = mmap.mmap(-1, 2**30); x[0] = 1; print('through')")
    assert THROUGH not in ran.output


@pytest.mark.parametrize(
    "code",
    [
        "while True: pass",
        "import time; time.sleep(1000)",
        "import signal, time\nfor s in (2, 14, 15): signal.signal(s, signal.SIG_IGN)\n"
        "while True: time.sleep(1)",
        "import threading\nthreading.Thread(target=threading.Event().wait).start()",
        "print('x' * 9, flush=True); import os; os.close(1); os.close(2)\nwhile True: pass",
        "import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)\nwhile True: pass",
        "import os\nos.execv('/usr/bin/sleep', ['sleep', '1000'])",
    ],
)
def test_it_ends_in_time(worker, code):
    begun = time.monotonic()
    ran = run(worker, code, limits=Limits(seconds=0.2))
    assert time.monotonic() - begun < 30
    assert ran.timed_out
    assert run(worker, "print(1)").output == "1\n"


def test_too_much_output_is_cut_off(worker):
    ran = run(worker, "while True: print('x' * 1000)")
    assert ran.why == "more than 64 KiB of output" and len(ran.output) < 200_000
    assert run(worker, "import sys\nsys.stderr.write('e' * 10**6); print(1)").output == "1\n"


@pytest.mark.parametrize(
    "code",
    [
        "import sys\nsys.setrecursionlimit(10**9)\ndef f(n): return f(n + 1)\nf(0)",
        "import ctypes; ctypes.string_at(0)",
        "import os; os.abort()",
        "x = []\nfor _ in range(10**6): x = [x]\nprint(repr(x))",
    ],
)
def test_a_crash_is_the_programs_own(worker, code):
    assert run(worker, code, limits=Limits(memory=96)).why
    assert run(worker, "print(1)").output == "1\n"


def test_limits_can_not_be_raised(worker):
    code = """
        import resource
        for name in ("AS", "CPU", "FSIZE", "NOFILE", "CORE"):
            try:
                resource.setrlimit(getattr(resource, "RLIMIT_" + name), (2**40, 2**40))
                print("through", name)
            except (OSError, ValueError):
                pass
        print("done")
    """
    assert run(worker, code).output == "done\n"


def test_a_program_leaves_nothing_for_the_next(worker):
    poison = """
        import builtins, collections, json, os, sys
        builtins.print = builtins.len = json.dumps = json.loads = None
        collections.Counter.update = None
        for name in list(sys.modules):
            if name.startswith("groupwise"):
                sys.modules[name].__dict__.clear()
        try:
            open("left", "w").write("x")
        except OSError:
            pass
        os.environ["LEFT"] = "x"
    """
    run(worker, poison)
    code = (
        "import os, collections, sys; print(len(collections.Counter('ab')), 'LEFT' in os.environ)"
    )
    assert run(worker, code).output == "2 False\n"
    if worker.wall in NESTED:
        assert run(worker, "import os; print(os.listdir('.'), os.getpid())").output == "[] 1\n"


def test_nothing_of_the_parent_is_there(worker, monkeypatch):
    monkeypatch.setenv("API_KEY", "s3cret")
    code = """
        import os
        found = []
        for number in range(200):
            try:
                os.fstat(number)
                found.append(number)
            except OSError:
                pass
        print("API_KEY" in os.environ, found)
    """
    fresh = Sandbox(worker.wall, slot=8)
    try:
        # Of 4 and 5 nothing is at the other end any more.
        assert run(fresh, code).output in ("False [0, 1, 2, 5]\n", "False [0, 1, 2]\n")
    finally:
        fresh.close()


def test_no_root_no_namespaces_no_mounts(worker):
    code = """
        import ctypes, os
        libc = ctypes.CDLL(None)
        for act in (lambda: os.setuid(0), lambda: os.chroot(".")):
            try:
                act()
                print("through")
            except OSError:
                pass
        for flags in (0x10000000, 0x20000, 0x40000000):
            if libc.unshare(flags) == 0: print("through")
        if libc.mount(b"none", b"/tmp", b"tmpfs", 0, None) == 0: print("through")
        if libc.umount2(b"/proc", 2) == 0: print("through")
        print(os.getuid() != 0)
    """
    assert run(worker, code).output == "True\n"


def test_standard_input_can_not_be_written(worker):
    code = """
        import os
        try:
            os.lseek(0, 0, 0)
            os.write(0, b"x")
            print("through")
        except OSError:
            print("done")
    """
    assert run(worker, code, "given").output == "done\n"


def test_the_self_test_finds_a_hole(monkeypatch):
    """A wall without a roof must not be believed."""
    wall = choose()
    with_hole = Sandbox(wall, slot=9)
    try:
        attacks.withstood(with_hole)
        monkeypatch.setattr(
            attacks, "PROGRAM", attacks.PROGRAM.replace("through = []", "through = ['fly']")
        )
        with pytest.raises(SandboxError, match="could fly"):
            attacks.withstood(with_hole)
        monkeypatch.setattr(attacks, "PROGRAM", "raise SystemExit(3)")
        with pytest.raises(SandboxError, match="harmless program does not run"):
            attacks.withstood(with_hole)
    finally:
        with_hole.close()


def test_programs_of_no_isolation_do_not_pass_the_self_test():
    open_to_all = attacks.PROGRAM.replace('attempt("trace', 'if 0: attempt("trace')
    worker = Sandbox("none", slot=10)
    try:
        with attacks._targets() as (given, evidence):
            ran = worker.script(open_to_all, json.dumps(given), attacks.LIMITS)
            seen = evidence()
        assert {"read a file", "connect over TCP", "fork"} <= set(json.loads(ran.output)[1])
        assert f"write /var/tmp/{given['name']}" in seen
        left = [folder for folder in given["folders"] if Path(folder, given["name"]).exists()]
        assert left == []  # what got through is told, and not left behind
    finally:
        worker.close()


def test_without_any_way_it_refuses(monkeypatch):
    monkeypatch.setattr(pool, "problem", lambda wall, python="": f"{wall}: not here")
    with pytest.raises(SandboxError, match=r"apt-get install bubblewrap.*in so many words"):
        choose()
    with pytest.raises(SandboxError, match="bubblewrap: not here"):
        choose("bubblewrap")
    assert choose(TRUST) == "none"
    for nearly in ("none", "off", "trust"):
        with pytest.raises(SandboxError, match="There is no isolation"):
            choose(nearly)


def test_a_cell_that_can_not_be_confined_runs_nothing(monkeypatch):
    """Fail closed: the step that fails stands for any."""
    wall = choose()
    original = isolation.settings

    def with_missing_folder(*args):
        return {**original(*args), "files": ["/etc/ld.so.cache", "/nowhere"]}

    monkeypatch.setattr(isolation, "settings", with_missing_folder)
    with pytest.raises(SandboxError):
        worker = Sandbox(wall, slot=11)
        worker.script("print('through')", "", LIMITS)


def test_a_dead_sandbox_is_replaced():
    sandboxes = SandboxPool(size=1)
    try:
        first = sandboxes.run(lambda worker, job: worker, None)
        for child in children(first.process.pid) | {first.process.pid}:
            with contextlib.suppress(ProcessLookupError):  # it ended with another of them
                os.kill(child, signal.SIGKILL)
        ran = sandboxes.run(lambda worker, job: worker.script(job, "", LIMITS), "print(1)")
        assert ran.output == "1\n"
    finally:
        sandboxes.close()


def children(pid):
    found = set()
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit():
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                if int(fields[1]) == pid:
                    found |= {int(entry.name)} | children(int(entry.name))
        except OSError:
            continue
    return found


@pytest.mark.parametrize("wall", WALLS)
def test_nothing_survives_the_parent(wall, tmp_path):
    if why := problem(wall):
        pytest.skip(why)
    name = f"orph{os.getpid()}{wall[:3]}"
    code = f"import ctypes,time\nctypes.CDLL(None).prctl(15, b'{name}', 0, 0, 0)\ntime.sleep(60)"
    script = tmp_path / "parent.py"
    script.write_text(
        "from groupwise.graders.sandbox.worker import Sandbox\n"
        "from groupwise.graders.sandbox.limits import Limits\n"
        f"Sandbox({wall!r}, slot=12).script({code!r}, '', Limits(seconds=60))\n"
    )
    parent = subprocess.Popen([sys.executable, script], env={**os.environ, "PYTHONPATH": "."})
    waited(lambda: named(name))
    inside = children(parent.pid)
    assert inside
    parent.kill()
    parent.wait()
    waited(lambda: not named(name) and not any(map(alive, inside)))


def alive(pid):
    """A process that only waits for somebody to bury it is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def waited(condition, seconds=120):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_home_that_is_called_like_the_scratch_is_no_hole(monkeypatch):
    monkeypatch.setenv("HOME", "/tmp")
    worker = Sandbox(choose(), slot=13)
    try:
        attacks.withstood(worker)
    finally:
        worker.close()


@pytest.mark.parametrize(
    "before",
    [
        ["env", "TMPDIR=LONG"],  # the address of a socket is short
        ["sh", "-c", 'exec "$0" "$@" <&- >&-'],  # a daemon's
        ["unshare", "--user", "--map-root-user"],  # root who knows nobody else
    ],
)
def test_odd_surroundings_are_no_hole_and_no_crash(before):
    wall = choose()
    code = f"from groupwise.graders.sandbox.pool import problem\nexit(problem({wall!r}) or None)"
    if subprocess.run([*before, "true"], capture_output=True).returncode:
        pytest.skip(f"{before[0]} can't be done here")
    # Of this test alone: others run beside it. Not below tmp_path, which other users can't enter.
    with tempfile.TemporaryDirectory(prefix="x" * 100) as folder:
        command = [word.replace("LONG", folder) for word in before]
        done = subprocess.run(
            [*command, sys.executable, "-c", code], capture_output=True, text=True
        )
        assert (done.returncode, done.stderr) == (0, "")


@pytest.fixture(scope="module")
def environment():
    """A virtual environment in the folder of a project that is installed to be worked on."""
    # Neither in /tmp, where a cell has its scratch, nor below tmp_path, which others can not enter.
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        place = Path(folder)
        place.chmod(0o755)
        base = isolation.interpreter("", everyone=True).executable
        subprocess.run([base, "-m", "venv", "--without-pip", folder], check=True)
        (place / "project").mkdir()
        (place / "project" / "answers.py").write_text("SECRET = 41\n")
        (place / "answers.txt").write_text("SECRET = 41\n")
        (packages,) = place.glob("lib/python3*/site-packages")
        (packages / "helper.py").write_text("VALUE = 7\n")
        (packages / "project.pth").write_text(f"{place / 'project'}\n")
        (packages / "finder.pth").write_text(f"import sys; sys.path.append({folder!r})\n")
        (packages / "linked").symlink_to(place / "project")
        yield place


@pytest.mark.parametrize("wall", WALLS)
def test_of_an_environment_it_sees_the_packages_alone(wall, environment):
    """Not the project that a .pth file names, nor the folder that the environment lies in."""
    python = str(environment / "bin" / "python")
    if why := problem(wall, python):
        pytest.skip(why)  # this machine does not offer it
    worker = Sandbox(wall, slot=14, python=python)
    code = f"""
    import importlib, sys
    import helper
    assert helper.VALUE == 7
    for name in ("answers", "linked.answers", "project.answers"):
        try: importlib.import_module(name)
        except (ImportError, OSError): continue
        print("{THROUGH}", name)
    for file in ("answers.txt", "project/answers.py", "pyvenv.cfg"):
        try: open({str(environment)!r} + "/" + file).read()
        except OSError: continue
        print("{THROUGH}", file)
    assert all({str(environment / "lib")!r} in p or {str(environment)!r} not in p for p in sys.path)
    print("done")
    """
    try:
        ran = run(worker, code)
    finally:
        worker.close()
    assert (ran.output, ran.why) == ("done\n", "")
