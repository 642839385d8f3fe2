"""A SLURM cluster of two nodes on this machine, for tests: the real daemons, on loopback.

Debian's slurmd takes one node a machine name, so each runs under a name of its own, in a namespace.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue", "unshare")
NODES = ("one", "two")
CONFIGURATION = """
ClusterName=trial
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
AuthType=auth/none
CredType=cred/none
SlurmUser=root
SlurmdUser=root
SlurmdParameters=config_overrides
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
MpiDefault=none
MailProg=/bin/true
SchedulerParameters=batch_sched_delay=0,sched_interval=1
"""


def why_not() -> str:
    """Why there can be none here; empty where there can."""
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing:
        return (
            f"SLURM is not installed ({missing[0]} is missing): apt-get install slurmctld slurmd "
            "slurm-client"
        )
    return "" if os.geteuid() == 0 else "SLURM's daemons need root here"


@contextlib.contextmanager
def cluster(folder: Path) -> Iterator[dict[str, str]]:
    """The cluster; yields the variables that its clients need."""
    ports = _free(3)
    text = CONFIGURATION.format(host=socket.gethostname(), port=ports[0], folder=folder)
    for name, port in zip(NODES, ports[1:], strict=True):
        where = f"NodeHostname={name} NodeAddr=127.0.0.1 Port={port}"
        text += f"NodeName={name} {where} CPUs=2 State=UNKNOWN\n"
        (folder / f"spool.{name}").mkdir(parents=True)
    text += f"PartitionName=trial Nodes={','.join(NODES)} Default=YES State=UP\n"
    (folder / "state").mkdir()
    (folder / "slurm.conf").write_text(text)
    (folder / "hosts").write_text(f"127.0.0.1 localhost {socket.gethostname()} one two\n")
    own = {"SLURM_CONF": str(folder / "slurm.conf")}
    named = "mount --bind {0}/hosts /etc/hosts; hostname {1}; exec slurmd -D -N {1}"
    words = [["slurmctld", "-D"]]
    words += [
        ["unshare", "--mount", "--uts", "sh", "-c", named.format(folder, name)] for name in NODES
    ]
    with contextlib.ExitStack() as held:
        for number, command in enumerate(words):
            log = held.enter_context(open(folder / f"daemon_{number}.log", "wb"))
            started = subprocess.Popen(
                command, stdout=log, stderr=log, env={**os.environ, **own}, start_new_session=True
            )
            held.callback(_end, started)
        _wait_for_nodes(own)
        yield own


def wait_for(number: str, own: dict[str, str], seconds: float = 240.0) -> None:
    """Wait until a job has left the queue."""
    end = time.monotonic() + seconds
    while _said(["squeue", "-h", "-j", number], own).strip():
        assert time.monotonic() < end, f"job {number} does not end"
        time.sleep(0.2)


def _wait_for_nodes(own: dict[str, str], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while _said(["sinfo", "-h", "-N", "-o", "%T"], own).split() != ["idle", "idle"]:
        assert time.monotonic() < end, "SLURM's nodes do not come up"
        time.sleep(0.2)


def _said(words: list[str], own: dict[str, str]) -> str:
    done = subprocess.run(words, env={**os.environ, **own}, capture_output=True, text=True)
    return done.stdout


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _free(count: int) -> list[int]:
    with contextlib.ExitStack() as held:
        taken = [held.enter_context(socket.socket()) for _ in range(count)]
        for each in taken:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in taken]
