"""What only some runs need: the command that installs it, from wherever it is read."""

from __future__ import annotations

import re
import shlex
import shutil
import sys
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path


def install(extra: str) -> str:
    """`pip install plotly matplotlib`: the packages of an extra by name, as no index has groupwise.

    With the Python that runs this, which need not be the one that `pip` belongs to.
    """
    pip = shutil.which("pip")
    own = pip is not None and Path(pip).absolute().parent == Path(sys.executable).absolute().parent
    command = "pip" if own else f"{shlex.quote(sys.executable)} -m pip"
    wanted = packages(extra)
    if not wanted:  # a checkout that is not installed
        wanted = ["-e", f"{Path(__file__).resolve().parents[1]}[{extra}]"]
    return f"{command} install {shlex.join(wanted)}"


def packages(extra: str) -> list[str]:
    """Those that the installed groupwise names for an extra; none where it is not installed."""
    try:
        listed = requires("groupwise") or []
    except PackageNotFoundError:
        return []
    split = [entry.partition(";") for entry in listed]
    mark = re.compile(rf"extra\s*==\s*['\"]{re.escape(extra)}['\"]")
    return [package.strip() for package, _, marker in split if mark.search(marker)]
