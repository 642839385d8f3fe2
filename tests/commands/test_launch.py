"""`groupwise launch`: what it writes, what it starts, and what it refuses before anything waits."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from processes import forked

from groupwise.cli import main
from groupwise.commands import doctor, launch, machine
from groupwise.parallel.launchers import on_machine, on_ray, on_slurm
from groupwise.parallel.launchers.job import RankJob, Servers

JOB = RankJob("t", ("-m", "groupwise", "train", "a b.toml", "run=r"), ranks=2, python="python")
H100 = machine.Gpu("H100", 80 * 10**9, 9.0, "570")


def said(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    status = main(["launch", *words])
    return status, *capsys.readouterr()


def test_one_machine_is_torchrun_and_one_rank_is_no_team(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    train = "-m groupwise train 'a b.toml' run=r"
    start = "python -m torch.distributed.run --standalone"
    assert on_machine.text(JOB) == f"{start} --nproc-per-node 2 {train}"
    assert on_machine.text(replace(JOB, ranks=1)) == f"python {train}"
    again = on_machine.text(replace(JOB, restarts=3))
    assert again == f"{start} --max-restarts 3 --nproc-per-node 2 {train}"
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr("os.cpu_count", lambda: 9)
    assert on_machine.text(JOB).startswith("OMP_NUM_THREADS=4 python")


def test_a_launch_becomes_what_it_starts(tmp_path: Path) -> None:
    """One rank: the run itself, in this process's place, with its words and its status."""
    status, out, err = forked(
        ["launch", "group_size=0", "--ranks", "1", "model.device=cpu"], tmp_path
    )
    assert status == 2 and "group_size" in err and not out
    words = ["launch", "model.device=cpu", "--ranks", "1", "--run", "there", "steps=1",
             "data.train=nowhere.jsonl", "data.eval=nowhere.jsonl"]  # fmt: skip
    status, out, err = forked(words, tmp_path)
    assert status == 2
    assert "-m groupwise train model.device=cpu steps=1" in err and "run=there" in err
    assert "nowhere.jsonl" in err.splitlines()[-1]


def test_slurm_gets_a_script_that_a_shell_understands(tmp_path: Path) -> None:
    job = replace(JOB, ranks=8, nodes=2, folder=Path("/some where"))
    text = on_slurm.script(job, tmp_path / "t.%j.log", {"partition": "gpu", "nodes": "3", "x": ""})
    assert subprocess.run(["bash", "-n"], input=text, text=True).returncode == 0
    lines = text.splitlines()
    assert lines[0] == "#!/bin/bash"
    for line in ("--gpus-per-node=8", "--ntasks-per-node=8", "--nodes=3", "--partition=gpu", "--x",
                 "--signal=TERM@120", f"--output={tmp_path}/t.%j.log"):  # fmt: skip
        assert f"#SBATCH {line}" in lines
    assert "cd '/some where' || exit 2" in lines
    cores = on_slurm.script(replace(job, gpus=False), tmp_path / "log", {})
    assert "--cpus-per-task=1" in cores and "gpus" not in cores


def test_the_script_starts_ranks_where_slurm_says(tmp_path: Path) -> None:
    """With SLURM's own programs played: who leads, at which port, with which words."""
    bin_ = tmp_path / "bin"
    bin_.mkdir()
    task = 'shift; SLURM_PROCID=3 SLURM_LOCALID=1 SLURM_NTASKS=4 exec "$@"'
    for name, does in {"scontrol": "echo b7; echo b9", "srun": task}.items():
        (bin_ / name).write_text(f"#!/bin/sh\n{does}\n")
        (bin_ / name).chmod(0o755)
    said = "import os, sys; print([os.environ[n] for n in sys.argv[1].split()], sys.argv[2:])"
    names = "RANK LOCAL_RANK WORLD_SIZE MASTER_ADDR MASTER_PORT OMP_NUM_THREADS"
    job = replace(JOB, nodes=2, folder=tmp_path, python=sys.executable,
                  words=("-c", said, names, "a b.toml", "$HOME"))  # fmt: skip
    own = {"PATH": f"{bin_}:/usr/bin:/bin", "SLURM_JOB_ID": "20017", "SLURM_CPUS_ON_NODE": "8",
           "SLURM_JOB_NODELIST": "b[7,9]"}  # fmt: skip
    text = on_slurm.script(job, tmp_path / "log", {})
    done = subprocess.run(["bash"], input=text, text=True, env=own, capture_output=True)
    where = ["3", "1", "4", "b7", "20017", "4"]
    assert done.stdout == f"{where} ['a b.toml', '$HOME']\n", done.stderr


def test_slurm_scripts_are_written_and_submitted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = (
        "model.device=cpu",
        "--on",
        "slurm",
        "--ranks",
        "2",
        "--run",
        str(tmp_path / "a" / "r"),
    )
    file = tmp_path / "a" / "r.sbatch"
    status, out, _ = said(capsys, *words, "--dry-run", "--sbatch", "time=1:00:00")
    assert status == 0 and "#SBATCH --time=1:00:00" in out and not file.exists()
    status, out, _ = said(capsys, *words)
    assert status == 0 and file.exists() and f"sbatch {file}" in out
    monkeypatch.setenv("PATH", str(tmp_path))
    status, _, err = said(capsys, *words, "--submit")
    assert status == 2 and "no sbatch on this machine" in err
    fake = tmp_path / "sbatch"
    for line, expected in (("echo Submitted batch job 71", 0), ("echo bad >&2; exit 1", 2)):
        fake.write_text(f"#!/bin/sh\n{line}\n")
        fake.chmod(0o755)
        status, out, err = said(capsys, *words, "--submit")
        assert status == expected
    assert "refused" in err and "bad" in err and "--sbatch partition=gpu" in err


def test_ray_is_asked_for_room_by_node_and_by_server() -> None:
    job = replace(JOB, nodes=2, servers=Servers(3, ("serve", "{port}"), gpus=4))
    ranks, servers = [{"CPU": 2.0, "GPU": 2.0}] * 2, [{"CPU": 1.0, "GPU": 4.0}] * 3
    assert on_ray.needs(job) == {"ranks": ranks, "servers": servers}
    assert on_ray.needs(replace(JOB, gpus=False)) == {"ranks": [{"CPU": 2.0}]}
    told = replace(job, words=("x={urls}", "y={url}")).with_addresses(["http://a:1", "http://b:2"])
    assert told.words == ('x=["http://a:1", "http://b:2"]', "y=http://a:1")


def test_ray_that_is_not_there_is_said(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "ray", None)
    status, _, err = said(capsys, "model.device=cpu", "--on", "ray", "--ranks", "1")
    assert status == 2 and "Ray is not installed" in err and "pip install ray" in err


def test_doctor_names_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    assert doctor.ranks(8).text == "8, one a GPU: groupwise launch"
    assert doctor.ranks(0).text.startswith("1 on the CPU; ")
    few = doctor.ranks(8, ["prompts_per_step=4"])
    assert few.status == "missing" and "8 ranks and prompts_per_step=4" in few.text
    assert "takes up to 32 (prompts_per_step)" in doctor.ranks(8, ["prompts_per_step=32"]).text
    monkeypatch.setattr(doctor.shutil, "which", lambda name: "/usr/bin/sbatch")
    assert "--on slurm" in doctor.ranks(0).text


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--ranks", "0"], "--ranks 0: at least 1"),
        ([], "How many ranks?"),
        (["--ranks", "2", "--nodes", "2"], "--nodes 2 on this machine alone"),
        (["--ranks", "9"], "9 ranks and prompts_per_step=8"),
        (["--ranks", "2", "--nodes", "5", "--on", "slurm"], "10 ranks and prompts_per_step=8"),
        (["--ranks", "2", "--on", "slurm", "--restarts", "1"], "--restarts is torchrun's"),
        (["--ranks", "2", "--submit"], "--submit belongs to --on slurm"),
        (["--ranks", "2", "--on", "ray", "--sbatch", "a=b"], "--sbatch belongs to --on slurm"),
        (["--ranks", "2", "--on", "slurm", "--sbatch", "X=1"], "is no option of sbatch"),
        (["--ranks", "2", "--on", "ray", "--servers", "2"], "belong together"),
        (["--ranks", "2", "--on", "ray", "--servers", "2", "--server", "x"], "has no {port}"),
        (["--ranks", "2", "--on", "ray", "--servers", "1", "--server", "x {port}"], "name servers"),
        (["--ranks", "2", "recipe=spin"], "samples from its reference"),
        (["--ranks", "2", "group_size=0"], "group_size"),
        (["--ranks", "2", "recipe=tis", "train.lag=1", "train.sync=keep"], "Set train.sync=drain"),
    ],
)
def test_what_could_not_run_is_refused_before_it_waits_in_a_queue(
    words: list[str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, err = said(capsys, "model.device=cpu", "prompts_per_step=8", *words)
    assert status == 2 and why in err and not out


def test_a_gpu_takes_one_rank(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch.machine, "gpus", lambda: [H100] * 4)
    status, _, err = said(capsys, "--ranks", "5", "--dry-run")
    assert status == 2 and "this machine has 4 GPUs" in err
    status, out, _ = said(capsys, "--dry-run")
    assert status == 0 and "--nproc-per-node 4" in out


def test_a_pipeline_is_launched_and_all_its_stages_are_checked_first(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    head = 'name = "two"\nmodel.device = "cpu"\nprompts_per_step = 4\n'
    stages = '[[stage]]\nname = "{}"\nrecipe = "sft"\nsteps = 1\n'
    file = tmp_path / "two.toml"
    file.write_text(head + stages.format("one") + stages.format("other"))
    status, out, _ = said(capsys, str(file), "--ranks", "4", "--dry-run")
    assert status == 0 and f"-m groupwise train {file} run=runs/two" in out
    file.write_text(file.read_text() + "prompts_per_step = 3\n")
    status, out, err = said(capsys, str(file), "--ranks", "4", "--dry-run")
    assert status == 2 and "stage 'other': 4 ranks and prompts_per_step=3" in err and not out
