"""Ways to keep a program in, and what each needs: the interpreter, the files, the command."""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from groupwise.errors import GroupwiseError
from groupwise.graders.sandbox.inside.zygote import DEVICES

Wall = Literal["bubblewrap", "namespaces", "landlock", "none"]
WALLS: tuple[Wall, ...] = ("bubblewrap", "namespaces", "landlock")
TRUST = "none, I trust the programs"
MODULES = (  # each uses those before it
    *("filter", "kernel", "wire", "operations", "values", "mirrors", "peer"),
    *("program", "counting", "examiner", "zygote"),
)
SYSTEM_FILES = ("/etc/ld.so.cache", "/etc/localtime")
ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "HOME": "/tmp",
    "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0",  # the order of sets: the same verdict every time
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
}
BOOT = """
import sys
sys.path[:] = [place for place in sys.path if place]
import json, socket, types
given = json.load(sys.stdin)
sys.path[:] = given["path"]
for name in ("groupwise", "groupwise.graders.sandbox", "groupwise.graders.sandbox.inside"):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = []
for name, source in given["sources"]:
    module = types.ModuleType("groupwise.graders.sandbox.inside." + name)
    sys.modules[module.__name__] = module
    setattr(sys.modules["groupwise.graders.sandbox.inside"], name, module)
    exec(compile(source, name + ".py", "exec"), module.__dict__)
module.main(socket.socket(fileno=int(sys.argv[1])), given["settings"])
"""


class SandboxError(GroupwiseError, RuntimeError):
    """Programs can't be run in isolation here, or a sandbox has failed."""


@dataclass(frozen=True)
class Interpreter:
    """The Python that programs run on, and the folders that it needs."""

    executable: str
    folders: tuple[str, ...]
    path: tuple[str, ...]


# The system's own, without /usr/src and other places where people put their work.
SYSTEM_FOLDERS = (
    *("/lib", "/lib32", "/lib64", "/bin", "/usr/bin", "/usr/lib", "/usr/lib32", "/usr/lib64"),
    *("/usr/libexec", "/usr/share", "/usr/local/lib", "/usr/local/lib64"),
)
# Where its library and its packages are. What else stands on sys.path came from a .pth file or a
# variable: a project that is worked on, with its tests and their answers beside it.
ASK = """
import json, os, sys, sysconfig
packages = sys.modules["site"].getsitepackages() if "site" in sys.modules else []
library = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib")]
prefixes = [sys.base_prefix, sys.base_exec_prefix]
shared = [os.path.join(prefix, name) for prefix in prefixes for name in ("lib", "lib64")]
print(json.dumps([
    os.path.realpath(sys.executable), library + packages, shared, sys.path,
    sys.version_info >= (3, 10),
]))
"""


@functools.cache
def interpreter(python: str, everyone: bool) -> Interpreter:
    """Return the named interpreter with its packages; else the running one without, or the
    system's.

    With `everyone`, it must lie where any user may read: a program runs as a user of its own.
    """
    named = [python] if python else [sys._base_executable, "/usr/bin/python3"]  # type: ignore[attr-defined]
    whys = []
    for candidate in named:
        found = shutil.which(candidate)
        if found is None:
            whys.append(f"{candidate} is no program")
            continue
        options = ["-I"] if python else ["-I", "-S"]
        asked = subprocess.run([found, *options, "-c", ASK], capture_output=True, text=True)
        if asked.returncode:
            whys.append(f"{candidate} does not start")
            continue
        executable, own, shared, path, recent = json.loads(asked.stdout)
        if not recent:
            whys.append(f"{candidate} is older than Python 3.10")
            continue
        folders = _outermost([*own, *shared, *SYSTEM_FOLDERS])
        closed = next((f for f in [executable, *folders] if everyone and not _open_to_all(f)), "")
        if closed:
            whys.append(f"{closed} can't be read by every user")
            continue
        places = [place for place in path if _is_within(place, own)]
        return Interpreter(executable, tuple(folders), tuple(places))
    raise SandboxError(f"No Python to run programs with: {'; '.join(whys)}. Install python3.")


def _outermost(folders: Sequence[str]) -> list[str]:
    """Return folders that exist, without those inside others; /lib may be a link, which is made
    anew.
    """
    top = [f for f in folders if os.path.dirname(f) == "/" and os.path.islink(f)]
    known = sorted({os.path.abspath(f) for f in folders if os.path.isdir(f) and f not in top})
    return [f for f in known if not any(_is_within(f, [o]) for o in known if o != f)]


def _is_within(place: str, folders: Sequence[str]) -> bool:
    """Return whether it really lies in one of these folders, wherever links lead."""
    real = os.path.realpath(place)
    return any(Path(real).is_relative_to(os.path.realpath(folder)) for folder in folders)


def _open_to_all(path: str) -> bool:
    """Return whether it and every folder above it may be entered by anyone."""
    real = Path(os.path.realpath(path))
    return all(place.stat().st_mode & 0o001 for place in (real, *real.parents))


def _as_stranger(wall: Wall, uid: int | None) -> bool:
    """Return whether it runs as another user among the files of this machine."""
    return wall in ("landlock", "none") and uid is not None


def settings(wall: Wall, slot_uid: int | None, python: str) -> dict[str, Any]:
    """Return the settings of the zygote."""
    found = interpreter(python, everyone=_as_stranger(wall, slot_uid))
    return {
        "wall": wall,
        "nested": wall in ("bubblewrap", "namespaces"),
        "uid": slot_uid,
        "folders": list(found.folders),
        "files": [*filter(os.path.exists, SYSTEM_FILES), *_outside(found)],
    }


def _outside(found: Interpreter) -> list[str]:
    """Return the interpreter itself, where it is in none of the folders."""
    return [] if _is_within(found.executable, found.folders) else [found.executable]


def boot_data(told: dict[str, Any], python: str) -> bytes:
    """Return what the interpreter reads first: the source of everything inside."""
    place = Path(__file__).parent / "inside"
    sources = [(name, (place / f"{name}.py").read_text()) for name in MODULES]
    found = interpreter(python, everyone=_as_stranger(told["wall"], told["uid"]))
    return json.dumps({"sources": sources, "settings": told, "path": list(found.path)}).encode()


def command(told: dict[str, Any], python: str, control: int) -> list[str]:
    """Return the command of a zygote that listens on this descriptor."""
    wall, root = told["wall"], told["uid"] is not None
    found = interpreter(python, everyone=_as_stranger(wall, told["uid"]))
    start = [found.executable, "-s", "-S", "-c", BOOT, str(control)]
    if wall != "bubblewrap":
        return start
    tool = shutil.which("bwrap")
    if tool is None:
        raise SandboxError("bubblewrap is not installed: apt-get install bubblewrap.")
    words = [tool, "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts"]
    words += ["--unshare-cgroup-try", "--new-session"]
    # Root mounts as root, since a Python may lie in its home, and becomes another user inside.
    words += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"] if root else ["--unshare-user"]
    for parent in _parents([*told["folders"], *told["files"], *DEVICES]):
        words += ["--dir", parent]  # else some are root's alone
    for folder in told["folders"]:
        words += ["--ro-bind", folder, folder]
    for file in told["files"]:
        words += ["--ro-bind", os.path.realpath(file), file]
    for path in ("/lib", "/lib64", "/bin"):
        if os.path.islink(path):
            words += ["--symlink", os.readlink(path), path]
    for device in DEVICES:
        words += ["--dev-bind", device, device]
    return [*words, "--proc", "/proc", "--dir", "/tmp", "--remount-ro", "/", "--chdir", "/", *start]


def _parents(paths: Sequence[str]) -> list[str]:
    """Return all folders above these but the root, from the top."""
    return sorted({str(above) for path in paths for above in Path(path).parents} - {"/"})
