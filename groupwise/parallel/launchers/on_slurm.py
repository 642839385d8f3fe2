"""A script for SLURM, which starts every rank itself; they meet on the first node.

No torchrun: SLURM signals all processes of a step, and torchrun its ranks once more, who would take
the second for "at once". The script is plain: it can be read, changed and submitted by hand, too.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from groupwise.errors import RunError
from groupwise.parallel.launchers.job import RankJob, shell

# Seconds before the time limit at which ranks are asked to end: the step is finished and saved.
NOTICE = 120
ID = re.compile(r"(\d+)")
SUBMIT_SECONDS = 60.0

SCRIPT = """\
#!/bin/bash
{options}
# Where ranks meet; two jobs on one machine must not meet at one port.
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000))
export MASTER_ADDR MASTER_PORT OMP_NUM_THREADS=${{OMP_NUM_THREADS:-{threads}}}
cd {folder} || exit 2
# A rank whose others are gone ends by itself, with a word. The same script, submitted again, goes
# on from the last checkpoint.
exec srun --kill-on-bad-exit=0 bash -c \
    'RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS exec "$@"' rank \
    {words}
"""


def script(job: RankJob, log: Path, options: Mapping[str, str]) -> str:
    """Return the script; `options` are sbatch's own, and go over what is written here."""
    share = {"gpus-per-node": str(job.ranks)} if job.gpus else {"cpus-per-task": "1"}
    asked = {
        "job-name": job.name,
        "nodes": str(job.nodes),
        "ntasks-per-node": str(job.ranks),
        **share,
        "output": str(log),
        "open-mode": "append",
        "signal": f"TERM@{NOTICE}",
        **options,
    }
    lines = (f"#SBATCH --{name}={value}" if value else f"#SBATCH --{name}"
             for name, value in asked.items())  # fmt: skip
    return SCRIPT.format(
        options="\n".join(lines),
        threads=f"$((SLURM_CPUS_ON_NODE > {job.ranks} ? SLURM_CPUS_ON_NODE / {job.ranks} : 1))",
        folder=shell([str(job.folder)]),
        words=shell([job.python, *job.words]),
    )


def submit(path: Path) -> str:
    """Submit a script; return the job's number."""
    if shutil.which("sbatch") is None:
        raise RunError(
            f"There is no sbatch on this machine, so {path} can't be submitted from here. Copy it "
            "to a login node of the cluster and run `sbatch` there."
        )
    done = subprocess.run(
        ["sbatch", str(path)], capture_output=True, text=True, timeout=SUBMIT_SECONDS
    )
    found = ID.search(done.stdout)
    if done.returncode or found is None:
        said = (done.stderr or done.stdout).strip() or f"it ended with status {done.returncode}"
        raise RunError(
            f"sbatch refused {path}: {said}. Give its options with --sbatch NAME=VALUE, such as "
            "--sbatch partition=gpu."
        )
    return found[1]
