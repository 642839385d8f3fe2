"""Facts about what a run ran on: versions, hardware, git state. No environment variables or
addresses.
"""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = ("groupwise", "torch", "numpy", "pyarrow", "safetensors", "tokenizers", "jinja2", "rich",
            "transformers", "bitsandbytes")  # fmt: skip


def machine_facts() -> dict[str, Any]:
    """Return the facts of this process, here and now; git is that of the working directory."""
    import torch

    return {
        "versions": versions(),
        "hardware": hardware(),
        "threads": torch.get_num_threads(),
        "git": git_state(Path.cwd()),
    }


def versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


def hardware() -> dict[str, Any]:
    import torch

    cuda = torch.cuda.is_available()
    return {
        "system": f"{platform.system()} {platform.release()}",
        "machine": platform.machine(),
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "cuda": torch.version.cuda if cuda else None,
    }


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())


def git_state(where: Path) -> dict[str, Any] | None:
    """Return commit, branch, and whether files differ from it; None outside git or without git.

    Not the remote's address: it may hold a password.
    """
    told = _git(where, "status", "--porcelain=v2", "--branch")
    lines = (told or "").splitlines()
    about = dict(line[2:].split(" ", 1) for line in lines if line.startswith("# branch."))
    commit, branch = about.get("branch.oid", "(initial)"), about.get("branch.head", "")
    if commit == "(initial)":  # nothing is committed yet
        return None
    return {
        "commit": commit,
        "branch": "HEAD" if branch == "(detached)" else branch,
        "changed": any(not line.startswith("# ") for line in lines),
    }


def _git(where: Path, *words: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "--no-optional-locks", "-C", str(where), *words],
            capture_output=True,
            text=True,
            timeout=10,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
