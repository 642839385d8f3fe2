"""Optional packages, and the command that installs each."""

from __future__ import annotations

import re
import shlex
import shutil
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2] / "pyproject.toml"  # of a checkout


def install(extra: str) -> str:
    """Return the command that installs an extra's packages: no index has groupwise itself."""
    return f"{pip()} install {shlex.join(packages(extra))}"


def pip() -> str:
    """Return the pip of the Python that runs this, which need not be the one that `pip` is."""
    own = shutil.which("pip")
    if own is not None and Path(own).absolute().parent == Path(sys.executable).absolute().parent:
        return "pip"
    return f"{shlex.quote(sys.executable)} -m pip"


def packages(extra: str) -> list[str]:
    """Return the packages of an extra: from the checkout, as its installed record may be older, or
    else from the installed groupwise.
    """
    if PROJECT.is_file():
        project = tomllib.loads(PROJECT.read_text("utf-8")).get("project", {})
        if project.get("name") == "groupwise":
            return list(project["optional-dependencies"][extra])
    try:
        listed = requires("groupwise") or []
    except PackageNotFoundError:
        return []
    split = [entry.partition(";") for entry in listed]
    mark = re.compile(rf"extra\s*==\s*['\"]{re.escape(extra)}['\"]")
    return [package.strip() for package, _, marker in split if mark.search(marker)]
