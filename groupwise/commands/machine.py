"""The hardware of this machine, found without PyTorch: cores, memory, GPUs, disk.

In a container the limits of its control group count, not what the host has.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")
GPU_QUERY = ("name", "memory.total", "compute_cap", "driver_version")


@dataclass(frozen=True)
class Gpu:
    """A GPU as its driver describes it."""

    name: str
    memory: int  # bytes
    capability: float  # bfloat16 came with 8.0
    driver: str

    @property
    def bfloat16(self) -> bool:
        return self.capability >= 8.0


def cores() -> int:
    """Count the cores that this process may use."""
    try:
        allowed = len(os.sched_getaffinity(0))
    except AttributeError:  # not on macOS
        allowed = os.cpu_count() or 1
    words = _words(CGROUP / "cpu.max")
    if len(words) == 2 and words[0].isdigit() and words[1].isdigit():
        return max(1, min(allowed, int(words[0]) // int(words[1])))
    return allowed


def memory_bytes() -> int:
    """Return the bytes of memory that this process may have."""
    there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    words = _words(CGROUP / "memory.max")
    return min(there, int(words[0])) if words and words[0].isdigit() else there


def processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.machine())


def gpus(timeout: float = 5.0) -> list[Gpu]:
    """List the GPUs that NVIDIA's driver knows; none where its tool is missing or fails."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    asked = [tool, f"--query-gpu={','.join(GPU_QUERY)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(asked, capture_output=True, text=True, timeout=timeout, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return [gpu for line in done.stdout.splitlines() if (gpu := _gpu(line)) is not None]


def _gpu(line: str) -> Gpu | None:
    fields = [field.strip() for field in line.split(",")]
    try:
        name, memory, capability, driver = fields
        return Gpu(name, int(memory) * 2**20, float(capability), driver)
    except ValueError:  # a field that this driver does not tell
        return None


def existing(path: Path) -> Path:
    """Return the folder itself, or the nearest one above it that exists."""
    path = path.absolute()
    return next(each for each in (path, *path.parents) if each.exists())


def _words(file: Path) -> list[str]:
    try:
        return file.read_text().split()
    except OSError:
        return []
