"""The run folder: what is on the disk after a crash, a full disk, a second writer, a resume."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import struct
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from groupwise.errors import RunError
from groupwise.records import Branch, Completion, Grade, Rollout, Task, Turn
from groupwise.runfiles import files, folder, manifest, recorder, rollouts
from groupwise.runfiles.files import append_lines, read_lines, write_atomic
from groupwise.runfiles.folder import Event, RunFolder
from groupwise.runfiles.recorder import Recorder, metrics_line
from groupwise.runfiles.rollouts import Row
from groupwise.sync.space import Space, check_space


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    made = RunFolder(tmp_path / "run")
    made.check_writable()
    return made


def row(sample: int = 0, **changes: Any) -> Row:
    known: dict[str, Any] = {
        "prompt_id": 7,
        "draw": 1,
        "group": 3,
        "sample": sample,
        "prompt_token_ids": (1, 2, 3),
        "token_ids": (4, 5),
        "sampler_logp": [-0.5, -0.25],
        "reward": 1.0,
    }
    return Row(**(known | changes))


def steps_of(path: Path) -> list[int]:
    return [value["step"] for _, value in read_lines(path)]


def python(code: str, *words: str, **options: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), *words],
        stdout=subprocess.PIPE,
        text=True,
        **options,
    )


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB of its own; needs the right to mount."""
    place = tmp_path / "mount"
    place.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)], capture_output=True
    )
    if done.returncode:
        pytest.skip("mounting is not permitted here")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


# --- lines --------------------------------------------------------------------------------------


def test_a_torn_last_line_is_left_out_and_written_over(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 2}\n{"step": 3, "rew')
    assert steps_of(path) == [1, 2]
    append_lines(path, ['{"step": 3}'])
    assert path.read_bytes() == b'{"step": 1}\n{"step": 2}\n{"step": 3}\n'


def test_a_whole_object_without_its_newline_is_torn_too(tmp_path: Path) -> None:
    """Else reader and writer would disagree about it."""
    path = tmp_path / "lines.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 2}')
    assert steps_of(path) == [1]
    append_lines(path, ['{"step": 2}'])
    assert steps_of(path) == [1, 2]


def test_a_torn_line_longer_than_a_block_and_a_file_of_one_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_bytes(b'{"step": 1}\n' + b"x" * 200_000)
    append_lines(path, ['{"step": 2}'])
    assert steps_of(path) == [1, 2]
    path.write_bytes(b"x" * 200_000)
    append_lines(path, ['{"step": 1}'])
    assert path.read_bytes() == b'{"step": 1}\n'


def test_zeros_at_the_end_of_a_file_are_a_torn_line(tmp_path: Path) -> None:
    """What a power failure leaves where a file had grown before its data arrived."""
    path = tmp_path / "lines.jsonl"
    path.write_bytes(b'{"step": 1}\n' + bytes(500) + b"7}\n")
    assert steps_of(path) == [1]


def test_a_broken_line_in_the_middle_is_no_crash(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_bytes(b'{"step": 1}\nnot json\n{"step": 3}\n')
    with pytest.raises(RunError, match=r"Line 2 of .*Restore the line"):
        read_lines(path)


def test_floats_come_back_bit_for_bit_and_what_is_not_finite_is_null() -> None:
    values = [0.1, 1 / 3, 5e-324, 1.7976931348623157e308, -0.0, float(np.float32(0.1)), 2.0**53 + 2]
    line = metrics_line(4, {f"m/{i}": v for i, v in enumerate(values)})
    back = json.loads(line)
    assert [struct.pack("d", back[f"m/{i}"]) for i in range(len(values))] == [
        struct.pack("d", v) for v in values
    ]
    odd = metrics_line(4, {"b": float("nan"), "a": float("inf"), "c": None, "d": 3, "e": "ab"})
    assert odd == '{"step": 4, "a": null, "b": null, "c": null, "d": 3, "e": "ab"}'


def test_metrics_are_numbers_or_texts(run: RunFolder) -> None:
    with Recorder(run) as made, pytest.raises(RunError, match=r"loss/total of step 1 is a Tensor"):
        made.step(1, [row()], {"loss/total": torch.tensor(1.0)})  # type: ignore[dict-item]


# --- atomic files -------------------------------------------------------------------------------


def test_a_failed_write_leaves_the_old_file_and_nothing_beside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "summary.json"
    write_atomic(path, "old")

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises(OSError):
        write_atomic(path, "new")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["summary.json"]


def test_a_failed_append_leaves_the_file_as_long_as_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "lines.jsonl"
    append_lines(path, ['{"step": 1}'])

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises(OSError):
        append_lines(path, ['{"step": 2}'])
    assert path.read_bytes() == b'{"step": 1}\n'


WRITER = """
    import sys
    from groupwise.runfiles.folder import RunFolder
    from groupwise.runfiles.recorder import Recorder
    from groupwise.runfiles.rollouts import Row
    run = RunFolder(sys.argv[1])
    run.check_writable()
    with run.locked(), Recorder(run) as recorder:
        run.rewind(run.durable_step())
        start = run.durable_step()
        print(start, flush=True)
        for step in range(start + 1, 100_000):
            run.write_config(f"{step:08}" * 4096)
            rows = [Row(i, 0, 0, i, (1, 2), tuple(range(50)), [0.5] * 50) for i in range(20)]
            recorder.step(step, rows, {"reward/mean": step / 7})
            recorder.event(step, "note", "x" * 300)
"""


def test_killed_at_any_moment_the_folder_is_whole(run: RunFolder) -> None:
    """kill -9, again and again: whole files, no gap, a line only with its rollouts."""
    last = 0
    for attempt in range(8):
        process = python(WRITER, str(run.path))
        assert process.stdout is not None
        assert int(process.stdout.readline()) == last  # what counted before counts now
        while run.durable_step() == last and process.poll() is None:
            time.sleep(0.01)
        time.sleep(0.013 * attempt)
        process.send_signal(signal.SIGKILL)
        process.wait()
        text = run.config.read_text()
        assert text == text[:8] * 4096
        steps = steps_of(run.metrics)
        assert steps == list(range(1, len(steps) + 1))
        for step in steps:
            assert rollouts.read(run.rollout(step)).num_rows == 20
        assert run.durable_step() == len(steps) > last
        last = len(steps)


# --- before anything expensive ------------------------------------------------------------------


def test_a_file_in_the_way_is_named(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("not a folder")
    with pytest.raises(RunError, match=r"file is in the way.*another run folder with --run"):
        RunFolder(tmp_path / "runs" / "a").check_writable()
    with pytest.raises(RunError, match="in the way"):
        RunFolder(tmp_path / "runs").check_writable()
    inside = tmp_path / "b"
    inside.mkdir()
    (inside / "rollouts").write_text("")
    with pytest.raises(RunError, match="rollouts of the run folder"):
        RunFolder(inside).check_writable()


def test_a_folder_in_the_way_of_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(RunError, match=r"metrics\.jsonl is a folder.*Move it away"):
        RunFolder(tmp_path).check_writable()


def test_too_little_room_is_known_before_the_start(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(RunError, match=r"free, and a checkpoint takes 1024\.0 TiB \(1\.0 GiB of"):
        check_space(run.checkpoints, Space(whole=2**50, best=2**30, keep=1))
    assert check_space(run.checkpoints, Space(whole=1024, best=512, keep=2)) is None
    usage = type("Usage", (), {"free": 3000})
    monkeypatch.setattr("groupwise.sync.space.shutil.disk_usage", lambda path: usage)
    nine = Space(whole=1000, best=100, keep=9)
    tight = check_space(run.checkpoints, nine)
    assert tight is not None and "checkpoint.keep=1 needs less" in tight
    # What is there already counts as room for later ones: it goes when the new ones come.
    (run.checkpoints / "old").write_bytes(bytes(10000))
    assert check_space(run.checkpoints, nine) is None
    usage.free = 999  # and not for the next one, which comes before an old one goes
    tight = check_space(run.checkpoints, nine)
    assert tight is not None and "999 bytes are free: a checkpoint takes 1000 bytes" in tight


def test_a_read_only_folder_is_refused(mounted: Path) -> None:
    """A read-only mount binds root too, unlike permissions."""
    subprocess.run(["mount", "-o", "remount,ro", str(mounted)], check=True)
    with pytest.raises(RunError, match=r"read-only for this user.*--run"):
        RunFolder(mounted / "a").check_writable()
    with pytest.raises(RunError, match="read-only"), RunFolder(mounted).locked():
        pass


def test_permissions_are_refused_in_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, data: bytes) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(folder, "write_atomic", refuse)
    with pytest.raises(RunError, match=r"read-only for this user.*Change its permissions"):
        RunFolder(tmp_path / "a").check_writable()


def test_the_check_changes_nothing(run: RunFolder) -> None:
    run.write_config("steps = 3\n")
    append_lines(run.metrics, ['{"step": 1}'])
    run.check_writable()
    assert run.config.read_text() == "steps = 3\n"
    assert run.metrics.read_text() == '{"step": 1}\n'
    names = {"config.toml", "metrics.jsonl", "rollouts", "checkpoints"}
    assert set(os.listdir(run.path)) == names
    assert os.listdir(run.rollouts) == []


# --- a full disk --------------------------------------------------------------------------------


def test_a_full_disk_stops_cleanly_and_goes_on_after_space_is_freed(mounted: Path) -> None:
    run = RunFolder(mounted / "run")
    run.check_writable()
    (run.checkpoints / "step_2").mkdir()
    (run.checkpoints / "latest").symlink_to("step_2")
    noise = np.random.default_rng(0).standard_normal((40, 200)).astype(np.float32)
    rows = [row(i, token_ids=tuple(range(200)), sampler_logp=noise[i]) for i in range(40)]
    made = Recorder(run)
    with pytest.raises(RunError) as caught, run.saying_what_is_left():
        for step in range(1, 500):
            made.step(step, rows, {"reward/mean": 0.5})
    message = str(caught.value)
    assert "full" in message and "checkpoints/step_2, is intact" in message
    assert "the same command again goes on from there" in message
    with pytest.raises(RunError, match="full"):
        made.close()
    counted = steps_of(run.metrics)
    assert counted == list(range(1, len(counted) + 1)) and len(counted) > 2
    assert all(rollouts.read(run.rollout(step)).num_rows == 40 for step in counted)
    assert not list(run.path.rglob("*.partial"))
    run.rewind(2)  # frees space
    with Recorder(run) as again:
        again.step(3, rows, {"reward/mean": 0.5})
    assert run.durable_step() == 3


def test_after_a_failure_no_later_step_counts(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Disk full at step 2 only; step 3 must not be written behind the gap."""
    real = recorder.write

    def sometimes(path: Path, rows: Any, step: int) -> None:
        if step == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(path, rows, step)

    monkeypatch.setattr(recorder, "write", sometimes)
    made = Recorder(run, depth=8)
    for step in (1, 2):
        made.step(step, [row()], {"reward/mean": 0.0})
    none_yet = r"There was no checkpoint yet.*starts from the beginning"
    with pytest.raises(RunError, match=none_yet), run.saying_what_is_left():
        made.step(3, [row()], {"reward/mean": 0.0})
        made.flush()
    with pytest.raises(RunError, match="full"):
        made.step(4, [row()], {"reward/mean": 0.0})
    with pytest.raises(RunError, match="full"):
        made.close()
    assert steps_of(run.metrics) == [1]
    assert run.rollout_steps() == [1]


def test_the_error_under_way_is_not_hidden(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(recorder, "write", full)
    with pytest.raises(ZeroDivisionError), Recorder(run) as made:
        made.step(1, [row()], {})
        raise ZeroDivisionError


# --- one writer ---------------------------------------------------------------------------------

HOLDER = """
    import os, sys, time
    from groupwise.runfiles.folder import RunFolder
    with RunFolder(sys.argv[1]).locked():
        if len(sys.argv) > 2 and os.fork() == 0:
            os.write(1, f"child {os.getpid()}\\n".encode())
            time.sleep(60)
            os._exit(0)
        os.write(1, b"held\\n")
        time.sleep(60)
"""


def test_a_second_writer_is_refused_and_told_the_pid(run: RunFolder) -> None:
    process = python(HOLDER, str(run.path))
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    message = rf"Process {process.pid} is writing.*Wait for it, stop it"
    with pytest.raises(RunError, match=message), run.locked():
        pass
    process.kill()
    process.wait()
    with run.locked():  # a process that died has let go
        assert json.loads((run.path / ".lock").read_text())["pid"] == os.getpid()
        with pytest.raises(RunError, match=f"Process {os.getpid()} is"), run.locked():
            pass
    with run.locked():
        pass


def test_a_forked_worker_does_not_keep_the_lock_of_a_dead_parent(run: RunFolder) -> None:
    process = python(HOLDER, str(run.path), "fork")
    assert process.stdout is not None
    said = sorted(process.stdout.readline().split() for _ in range(2))
    assert said[1] == ["held"]
    worker = int(said[0][1])
    with pytest.raises(RunError), run.locked():  # the child's leaving did not free it
        pass
    process.kill()
    process.wait()
    os.kill(worker, 0)  # the worker lives
    with run.locked():
        pass
    os.kill(worker, signal.SIGKILL)


# --- rewind -------------------------------------------------------------------------------------


def record(run: RunFolder, steps: range) -> None:
    with Recorder(run) as made:
        for step in steps:
            rows = [row(i, reward=step / 3) for i in range(2)] if step else []
            made.step(step, rows, {"reward/mean": step / 3}, [Event(step, "note", f"at {step}")])


def test_rewind_drops_exactly_what_is_after_the_step(run: RunFolder) -> None:
    record(run, range(0, 4))
    before = {path: path.read_bytes() for path in (run.metrics, run.rollout(2), run.rollout(3))}
    record(run, range(4, 12))
    assert run.rollout_steps() == list(range(1, 12))  # by number: 10 comes after 9
    (run.rollouts / ".step_12.parquet.partial").write_bytes(b"half")
    with open(run.metrics, "ab") as file:
        file.write(b'{"step": 12, "rew')
    run.tidy()
    dropped = run.rewind(3)
    assert (dropped.metrics, dropped.events, dropped.rollouts) == (tuple(range(4, 12)),) * 3
    assert len(dropped) == 8 and f"{dropped}" == "8"
    assert {path: path.read_bytes() for path in before} == before
    assert steps_of(run.events) == [0, 1, 2, 3]
    assert run.rollout_steps() == [1, 2, 3]
    assert not list(run.rollouts.glob(".*"))
    assert not run.rewind(3)


def test_evaluations_are_written_by_task_and_rewound_with_their_steps(run: RunFolder) -> None:
    with Recorder(run) as made:
        for step in range(5):
            by_task = {"eval/accuracy": [1.0, None, step / 4]} if step % 2 == 0 else None
            made.step(step, [], {"reward/mean": 0.5}, by_task=by_task)
    assert steps_of(run.evaluations) == [0, 2, 4]
    assert run.read_evaluations()[1] == {"step": 2, "eval/accuracy": [1.0, None, 0.5]}
    run.rewind(3)
    assert steps_of(run.evaluations) == [0, 2]


def test_rewind_to_before_the_start_drops_all(run: RunFolder) -> None:
    record(run, range(0, 3))
    assert len(run.rewind(-1)) == 3
    assert run.read_metrics() == run.read_events() == run.rollout_steps() == []


def test_rewinding_and_recording_again_gives_the_same_bytes(run: RunFolder) -> None:
    record(run, range(0, 6))
    whole = {path.name: path.read_bytes() for path in [run.metrics, *run.rollouts.iterdir()]}
    run.rewind(2)
    record(run, range(3, 6))
    assert whole == {p.name: p.read_bytes() for p in [run.metrics, *run.rollouts.iterdir()]}


def test_a_rewind_cut_short_is_completed_by_the_next(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    record(run, range(1, 6))

    def cut(self: Path, *_: Any, **__: Any) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch, pytest.raises(RunError, match="disk reports an error"):
        patch.setattr(Path, "unlink", cut)
        run.rewind(2)
    assert steps_of(run.metrics) == [1, 2]  # lines went before the rollouts that they promise
    assert run.durable_step() == 2
    run.rewind(2)
    assert run.rollout_steps() == [1, 2]


def test_durable_step_stops_before_a_gap(run: RunFolder) -> None:
    assert run.durable_step() == 0
    record(run, range(0, 5))
    assert run.durable_step() == 4
    run.rollout(3).unlink()
    assert run.durable_step() == 2


# --- the recorder -------------------------------------------------------------------------------


def test_a_step_counts_only_after_its_rollouts_and_events(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    real = RunFolder.add_metrics

    def watch(self: RunFolder, line: str) -> None:
        seen.append((self.rollout(1).exists(), steps_of(self.events)))
        real(self, line)

    monkeypatch.setattr(RunFolder, "add_metrics", watch)
    with Recorder(run) as made:
        made.step(1, [row()], {}, [Event(1, "note", "hello")])
    assert seen == [(True, [1])]


def test_writing_is_off_the_critical_path_and_bounded(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    import threading

    disk = threading.Event()
    real = recorder.write
    monkeypatch.setattr(recorder, "write", lambda *words: (disk.wait(), real(*words)))
    made = Recorder(run, depth=1)
    made.step(1, [row()], {})
    made.step(2, [row()], {})  # neither waited for the disk
    assert steps_of(run.metrics) == []
    third = threading.Thread(target=made.step, args=(3, [row()], {}))
    third.start()
    third.join(0.3)
    assert third.is_alive()  # one on the disk, one in the queue: the third waits
    disk.set()
    third.join()
    made.flush()
    assert steps_of(run.metrics) == [1, 2, 3]
    made.close()


def test_steps_go_forward_and_end_with_close(run: RunFolder) -> None:
    made = Recorder(run)
    made.step(2, [row()], {})
    with pytest.raises(RunError, match="Step 2 can't be recorded: step 2 was before"):
        made.step(2, [row()], {})
    made.close()
    made.close()
    with pytest.raises(RunError, match="closed"):
        made.step(3, [row()], {})
    assert steps_of(run.metrics) == [2]


def test_events_keep_their_order_and_fields(run: RunFolder) -> None:
    with Recorder(run) as made:
        made.event(0, "resume", "continues", tokens=3)
        made.step(1, [row()], {}, [Event(1, "health", "half a pair: \ud800", {"x": float("nan")})])
    run.add_events([Event(1, "end", "done", {})])
    first, second, third = run.read_events()
    assert list(first) == ["step", "kind", "text", "tokens", "time/at"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", first["time/at"])
    assert (second["text"], second["x"]) == ("half a pair: ?", None)
    assert [e["kind"] for e in (first, second, third)] == ["resume", "health", "end"]


# --- rollouts -----------------------------------------------------------------------------------

ODD_FLOATS = np.array(
    [0x00000000, 0x80000000, 0x00000001, 0x7F7FFFFF, 0x7F800000, 0xFF800000, 0x7FC00000,
     0x7FC01234, 0x3DCCCCCD, 0xBEAAAAAB],
    dtype=np.uint32,
).view(np.float32)  # fmt: skip


@pytest.mark.parametrize("name", [n for n in rollouts.PER_TOKEN if n not in ("mask", "clipped")])
def test_float32_comes_back_bit_for_bit(tmp_path: Path, name: str) -> None:
    """0 and -0, the smallest and largest numbers, infinities, NaN with a payload."""
    ids = tuple(range(len(ODD_FLOATS)))
    field = rollouts.field_of(name)
    given = row(token_ids=ids, **({"sampler_logp": [0.0] * len(ids)} | {field: ODD_FLOATS}))
    rollouts.write(tmp_path / "a.parquet", [given, given], 1)
    column = rollouts.read(tmp_path / "a.parquet")[name].combine_chunks()
    back = column.flatten().to_numpy(zero_copy_only=False).view(np.uint32)
    assert back.tolist() == np.tile(ODD_FLOATS.view(np.uint32), 2).tolist()


def test_every_column_comes_back(tmp_path: Path) -> None:
    full = row(
        mask=torch.tensor([True, False]),
        turns=(Turn("assistant", 0, 1), Turn("tool", 1, 2)),
        branch=Branch(1, 2),
        learner_logp=torch.tensor([-0.5, 0.0]),
        ref_logp=[-1.0, 0.0],
        teacher_logp=[-0.75, 0.0],
        entropy=np.array([0.5, 0.0]),
        advantage=[1.5, 0.0],
        coefficient=[0.25, 0.0],
        ratio=[1.0, 0.0],
        clipped=torch.tensor([True, False]),
        value=[0.75, 0.0],
        return_=torch.tensor([0.5, 0.0]),
        process_reward=[-0.25, 0.0],
        rerouted=[0.5, 0.0],
        routes=torch.tensor([[[3, 300]], [[-1, -1]]], dtype=torch.int16),
        reward=0.1,
        reward_parts={"number": 1.0, "format": None},
        reward_steps=[(3, 0.1), (3, -1.0), (9, 0.5)],
        correct=True,
        grader_status="timeout",
        grader_reason="took 3 s",
        finish="length",
        weight_version=9,
        weights="stale:2",
        used=False,
        prompt='"1+1="',
        prompt_text="1+1=",
        text="two \x00\ud800",
        answer="2",
    )
    rollouts.write(tmp_path / "a.parquet", [full, row(1, reward=None)], 12)
    first, second = rollouts.read(tmp_path / "a.parquet").to_pylist()
    assert first == {
        "step": 12,
        "prompt_id": 7,
        "draw": 1,
        "group": 3,
        "sample": 0,
        "prompt_token_ids": [1, 2, 3],
        "token_ids": [4, 5],
        "mask": [True, False],
        "branch": {"at": 1, "number": 2},
        "turns": [
            {"role": "assistant", "start": 0, "end": 1},
            {"role": "tool", "start": 1, "end": 2},
        ],
        "sampler_logp": [-0.5, -0.25],
        "learner_logp": [-0.5, 0.0],
        "ref_logp": [-1.0, 0.0],
        "teacher_logp": [-0.75, 0.0],
        "entropy": [0.5, 0.0],
        "advantage": [1.5, 0.0],
        "coefficient": [0.25, 0.0],
        "ratio": [1.0, 0.0],
        "clipped": [True, False],
        "value": [0.75, 0.0],
        "return": [0.5, 0.0],
        "process_reward": [-0.25, 0.0],
        "rerouted": [0.5, 0.0],
        "episode": None,
        "turn_seconds": None,
        "routes": {"layers": 1, "chosen": 2, "experts": [3, 300, -1, -1]},
        "reward": 0.1,
        "reward_parts": [("number", 1.0), ("format", None)],
        "reward_steps": [
            {"end": 3, "reward": 0.1},
            {"end": 3, "reward": -1.0},
            {"end": 9, "reward": 0.5},
        ],
        "correct": True,
        "grader_status": "timeout",
        "grader_reason": "took 3 s",
        "finish": "length",
        "weight_version": 9,
        "weights": "stale:2",
        "used": False,
        "prompt": '"1+1="',
        "prompt_text": "1+1=",
        "text": "two \x00?",
        "answer": "2",
    }
    absent = set(rollouts.PER_TOKEN) - {"mask", "sampler_logp"}
    assert {name for name, value in second.items() if value is None} == absent | {
        "reward", "correct", "answer", "branch", "prompt", "routes", "episode", "turn_seconds",
    }  # fmt: skip
    assert second["mask"] == [True, True]


def test_a_row_from_a_rollout(tmp_path: Path) -> None:
    done = Completion((4, 5), torch.tensor([-0.5, -0.25]), "stop", 3, "int8")
    grade = Grade(None, {"number": None}, None, "error", "ValueError: no")
    rollout = Rollout(Task(8, "1+1=", 2, token_ids=(1, 2)), 1, 0, done, "2;", grade)
    made = Row.of(rollout, group=5, prompt_text="1+1=", used=False, entropy=torch.ones(2))
    rollouts.write(tmp_path / "a.parquet", [made], 1)
    (back,) = rollouts.read(tmp_path / "a.parquet").to_pylist()
    assert (back["prompt_id"], back["group"], back["answer"]) == (8, 5, "2")
    assert (back["reward"], back["grader_status"]) == (None, "error")  # not a reward of 0
    assert (back["finish"], back["weight_version"], back["weights"]) == ("stop", 3, "int8")
    assert (back["token_ids"], back["entropy"]) == ([4, 5], [1.0, 1.0])


def test_the_same_rows_give_the_same_bytes(tmp_path: Path) -> None:
    """In another process and a second later: nothing depends on the clock or on hashing."""
    code = """
        import sys
        from pathlib import Path
        from groupwise.runfiles.rollouts import Row, write
        rows = [Row(i, 0, 0, i, (1, 2), (3, i), [0.1 * i, -0.0], reward=i / 3,
                    reward_parts={"a": 1.0, "b": None}, text=f"t{i}") for i in range(50)]
        write(Path(sys.argv[1]), rows, 3)
    """
    for name, seed in (("a", "1"), ("b", "2")):
        env = os.environ | {"PYTHONHASHSEED": seed}
        assert python(code, str(tmp_path / name), env=env).wait() == 0
        if name == "a":
            time.sleep(1.0)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_no_rows_are_a_file_too(run: RunFolder) -> None:
    """All groups dropped and none left: the step still counts."""
    with Recorder(run) as made:
        made.step(1, [], {})
    table = rollouts.read(run.rollout(1))
    assert table.num_rows == 0 and table.schema == rollouts.to_table([row()], 1).schema


def test_a_list_of_another_length_is_refused() -> None:
    with pytest.raises(RunError, match="Row 1 of step 4 has 3 values of entropy for 2 tokens"):
        rollouts.to_table([row(), row(entropy=[0.0] * 3)], 4)


def test_files_that_are_not_ours_are_refused(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = tmp_path / "a.parquet"
    with pytest.raises(RunError, match="no rollouts at"):
        rollouts.read(path)
    path.write_bytes(b"PAR1 and no more")
    with pytest.raises(RunError, match="not a Parquet file"):
        rollouts.read(path)
    pq.write_table(pa.table({"a": [1]}), path)
    with pytest.raises(RunError, match="schema none, this groupwise reads 1"):
        rollouts.read(path)


def test_the_page_has_the_schema() -> None:
    page = (Path(__file__).parents[2] / "docs" / "run_folder.md").read_text("utf-8")
    assert f"schema version {rollouts.VERSION}" in page
    written = re.findall(r"^\| `(\w+)` \| ([\w<>, ]+) \|", page.split("## Rollouts")[1], re.M)
    schema = rollouts.to_table([row()], 1).schema
    types = [re.sub(r"\w+: ", "", str(field.type)) for field in schema]
    assert written == list(zip(schema.names, types, strict=True))


# --- the manifest -------------------------------------------------------------------------------


def test_the_manifest_says_what_ran_and_no_secrets(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    place = tmp_path / "work"
    place.mkdir()
    monkeypatch.setenv("HF_TOKEN", "hf_secret_123")
    monkeypatch.chdir(place)
    for words in (
        ["init", "-q", "-b", "trunk"],
        ["remote", "add", "origin", "https://me:secret_456@example.com/x"],
        ["-c", "user.name=a", "-c", "user.email=a@b.c", "commit", "-q", "--allow-empty", "-m", "x"],
    ):
        subprocess.run(["git", *words], check=True)
    run.write_manifest({"data": "d1", "weights": "w1"}, seconds=1.5, tokens=10)
    text = run.manifest.read_text()
    assert "secret" not in text
    found = run.read_manifest()
    assert found["git"]["branch"] == "trunk" and found["git"]["changed"] is False
    assert len(found["git"]["commit"]) == 40
    assert found["versions"]["torch"] == torch.__version__
    assert found["threads"] == torch.get_num_threads()
    assert found["origin"] == {"data": "d1", "weights": "w1"}
    assert found["cost"] == {"seconds": 1.5, "tokens": 10}
    (place / "new.txt").write_text("")
    assert manifest.git_state(place)["changed"] is True  # type: ignore[index]


def test_no_git_is_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert manifest.git_state(tmp_path) is None
    monkeypatch.setenv("PATH", "")
    assert manifest.git_state(Path.cwd()) is None


def test_a_start_on_something_else_is_remembered(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.write_manifest({"data": "d"}, seconds=1.0, tokens=1)
    run.write_manifest({"data": "d"}, seconds=2.0, tokens=2)
    run.write_cost(seconds=3.0, tokens=3)
    assert run.read_manifest()["earlier"] == []
    threads = run.read_manifest()["threads"]
    monkeypatch.setattr(torch, "get_num_threads", lambda: 99)
    run.write_manifest({"data": "d"}, seconds=4.0, tokens=4)
    found = run.read_manifest()
    assert found["threads"] == 99 and found["cost"] == {"seconds": 4.0, "tokens": 4}
    assert [earlier["threads"] for earlier in found["earlier"]] == [threads]


def test_the_configuration_comes_back_as_it_was(run: RunFolder) -> None:
    assert run.read_config() is None
    run.write_config("# ℓ\nsteps = 3\n")
    assert run.read_config() == "# ℓ\nsteps = 3\n"


def test_a_damaged_manifest_is_named(run: RunFolder) -> None:
    run.manifest.write_text("{")
    with pytest.raises(RunError, match=r"manifest\.json is not JSON.*Remove it"):
        run.read_manifest()


def test_the_folder_needs_no_torch() -> None:
    code = (
        "import sys, groupwise.runfiles.recorder, groupwise.watch.report, groupwise.watch.display\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
