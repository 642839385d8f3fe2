"""What can be wrong with the files of a run: each kind as a function that does it to a folder."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from groupwise.runfiles.folder import RunFolder
from groupwise.runfiles.rollouts import VERSION, VERSION_KEY

Damage = Callable[[RunFolder], None]

SOUND = b'{"step": 1}\n'
DEEP = b"[" * 100_000 + b"]" * 100_000
NESTED = b"[" * 400 + b"]" * 400  # the parser takes it, and what goes through it would not
HUGE = b"9" * 5_000

# Each stands as a line between two sound ones.
LINES = {
    "no JSON": b'{"step": 2, "rew',
    "binary": bytes(range(1, 10)) + b"\xff\xfe\x00",
    "empty": b"",
    "a list": b"[1, 2]",
    "null": b"null",
    "a number": b"7",
    "deep": b'{"step": 2, "x": ' + DEEP + b"}",
    "nested": b'{"step": 2, "x": ' + NESTED + b"}",
    "no step": b'{"reward/mean": 0.5, "kind": "health", "config": ""}',
    "step is a text": b'{"step": "2", "kind": "health", "config": ""}',
    "step is null": b'{"step": null, "config": ""}',
    "step is no whole number": b'{"step": 2.5, "config": ""}',
    "step is true": b'{"step": true, "config": ""}',
    "step is huge": b'{"step": ' + HUGE + b', "config": ""}',
    "step is not finite": b'{"step": Infinity, "config": ""}',
    "step is negative": b'{"step": -3, "config": ""}',
}
# Of one file; what is wrong with them is its own.
METRICS = {
    "a text for a number": b'{"step": 2, "reward/mean": "high", "time/step": "long"}',
    "a list for a number": b'{"step": 2, "reward/mean": [1]}',
}
EVENTS = {
    "a number for a text": b'{"step": 2, "kind": "health", "text": 7}',
    "a list for a kind": b'{"step": 2, "kind": ["health"], "text": ""}',
    "a text for a step": b'{"step": 2, "kind": "health", "text": "", "first_bad_step": "x"}',
    "a list for a start": b'{"step": 2, "kind": "settings", "text": "", "start": [1]}',
}
STARTS = {
    "no configuration": b'{"step": 2}',
    "changes are a text": b'{"step": 2, "config": "", "changed": "x"}',
    "a change of nothing": b'{"step": 2, "config": "", "changed": [{"what": "x"}]}',
    "hashes are a list": b'{"step": 2, "config": "", "origin": [1]}',
}
# What is no damage: it is shown, or left out, and nobody stumbles over it.
HARMLESS_METRICS = {
    "not finite": b'{"step": 2, "reward/mean": NaN, "eval/accuracy": -Infinity, "x": 1e999}',
    "a huge number": b'{"step": 2, "reward/mean": ' + HUGE + b"}",
    "a long text": b'{"step": 2, "x": "' + b"y" * 3_000_000 + b'"}',
    "a long name": b'{"step": 2, "' + b"y" * 1_000_000 + b'": 1}',
    "half a character": b'{"step": 2, "x\\ud800": "\\uDfff", "y\\ud83d": 1}',
    "markup": b'{"step": 2, "<script>alert(1)</script>": 1}',
}
HARMLESS_EVENTS = {
    "no text": b'{"step": 2, "kind": "health"}',
    "nothing but a step": b'{"step": 2}',
    "a long text": b'{"step": 2, "kind": "' + b"y" * 10**6 + b'", "text": "' + b"y" * 10**6 + b'"}',
    "half a character": b'{"step": 2, "kind": "reward", "text": "\\ud800"}',
    "nothing is finite": b'{"step": 99, "kind": "health", "text": "", "rule": "truncation", '
    b'"metric": "x", "value": NaN, "limit": NaN, "first_bad_step": 3}',
}
OBJECTS = {
    "no JSON": b"{",
    "binary": bytes(range(1, 20)) + b"\xff",
    "empty": b"",
    "a list": b"[1]",
    "null": b"null",
    "a text": b'"x"',
    "not finite": b"NaN",
    "deep": DEEP,
    "nested": b'{"steps": 3, "hardware": {"x": ' + NESTED + b'}, "samples": ' + NESTED + b"}",
}
SUMMARIES = {
    "no steps": b'{"seconds": 3}',
    "steps are a text": b'{"steps": "3"}',
    "samples are a text": b'{"steps": 3, "samples": "abc"}',
    "samples of nothing": b'{"steps": 3, "samples": [{}, null]}',
    "a sample's text is a number": b'{"steps": 3, "samples": [{"prompt": 1, '
    b'"before": 2, "after": 3}]}',
    "seconds are a text": b'{"steps": 3, "seconds": "long"}',
}
MANIFESTS = {
    "cost is a list": b'{"cost": [1]}',
    "cost of nothing": b'{"cost": {}}',
    "seconds are a text": b'{"cost": {"seconds": "x", "tokens": 3}}',
    "versions are a text": b'{"versions": "1.0"}',
    "hashes are null": b'{"origin": null}',
    "earlier is a number": b'{"earlier": 3}',
}
CONFIGS = {
    "no TOML": b"steps = = 3",
    "binary": bytes(range(1, 20)) + b"\xff\xfe",
    "deep": b"x = " + b"[" * 100_000,
    "a huge number": b"steps = " + HUGE,
}


def between(name: str, line: bytes, keep: bytes = SOUND) -> Damage:
    """The line before the sound lines of a file."""

    def damage(run: RunFolder) -> None:
        path = run.path / name
        there = path.read_bytes() if path.exists() else keep
        path.write_bytes(line + b"\n" + there)

    return damage


def whole(name: str, data: bytes) -> Damage:
    return lambda run: (run.path / name).write_bytes(data) and None


def instead(name: str, make: Callable[[Path], object]) -> Damage:
    """Something else where the file was."""

    def damage(run: RunFolder) -> None:
        path = run.path / name
        path.unlink(missing_ok=True)
        make(path)

    return damage


def link_out(path: Path) -> None:
    """To a file beside the run's folder that nobody is to see."""
    home = path.parent if path.parent.name != "rollouts" else path.parent.parent
    outside = home.parent / "outside"
    outside.write_text("secret = 'of somebody else'\n")
    path.symlink_to(outside)


PLACES: dict[str, Callable[[Path], object]] = {
    "a folder": Path.mkdir,
    "a pipe": os.mkfifo,
    "a link out": link_out,
    "a link to itself": lambda path: path.symlink_to(path.name),
    "a device": lambda path: path.symlink_to("/dev/zero"),
}
NAMES = ("config.toml", "metrics.jsonl", "events.jsonl", "starts.jsonl", "manifest.json",
         "summary.json")  # fmt: skip
STEP = "rollouts/step_1.parquet"


def table(change: Callable[[pa.Table], pa.Table], version: bytes = str(VERSION).encode()) -> Damage:
    """The rollouts of the first step, otherwise."""

    def damage(run: RunFolder) -> None:
        found = change(pq.read_table(run.rollout(1)))
        pq.write_table(found.replace_schema_metadata({VERSION_KEY: version}), run.rollout(1))

    return damage


def column(name: str, values: Callable[[pa.ChunkedArray], object]) -> Damage:
    return table(lambda found: found.set_column(
        found.column_names.index(name), name, values(found.column(name))))  # fmt: skip


def cut(run: RunFolder) -> None:
    data = run.rollout(1).read_bytes()
    run.rollout(1).write_bytes(data[: len(data) // 2])


def torn_inside(run: RunFolder) -> None:
    data = bytearray(run.rollout(1).read_bytes())
    data[100:2000] = bytes(1900)
    run.rollout(1).write_bytes(data)


ROLLOUTS: dict[str, Damage] = {
    "cut off": cut,
    "torn inside": torn_inside,
    "empty": whole(STEP, b""),
    "binary": whole(STEP, bytes(range(256)) * 9),
    "groups are texts": column("group", lambda c: pa.array(["x"] * len(c))),
    "tokens are numbers": column("token_ids", lambda c: pa.array([1] * len(c))),
    "tokens have nulls": column("token_ids", lambda c: pa.array([[1, None]] * len(c))),
    "rewards are lists": column("reward", lambda c: pa.array([[1.0]] * len(c))),
    "reward parts are a text": column("reward_parts", lambda c: pa.array(["x"] * len(c))),
    "branches are numbers": column("branch", lambda c: pa.array([1] * len(c))),
    "texts are no UTF-8": column(
        "text", lambda c: pa.array([b"\xff\xfe"] * len(c)).view(pa.string())
    ),
}
UNREAD_BY_REPORTS = {
    f"rollouts: {kind}"
    for kind in ("groups are texts", "tokens are numbers", "tokens have nulls",
                 "reward parts are a text")
}  # fmt: skip
# Shown as far as it goes.
HARMLESS_ROLLOUTS: dict[str, Damage] = {
    "only other columns": table(lambda found: pa.table({"a": [1, 2, 3]})),
    "other columns of no version": table(lambda found: pa.table({"a": [1]}), b"x"),
    "no rows": table(lambda found: found.slice(0, 0)),
    "rewards are not finite": column("reward", lambda c: pa.array([float("nan")] * len(c))),
    "wider numbers": column("group", lambda c: c.cast(pa.int32())),
    **{
        f"{name} is null": column(name, lambda c: pa.nulls(len(c), c.type))
        for name in ("branch", "value", "return", "process_reward",
                     "prompt_id", "draw", "group", "sample", "token_ids", "reward", "reward_parts",
                     "reward_steps", "correct", "grader_status", "grader_reason", "finish", "used",
                     "prompt_text", "text", "answer", "weights", "sampler_logp", "clipped")
    },
}  # fmt: skip

DAMAGES: dict[str, tuple[str, Damage]] = {
    **{f"{file}: {kind}": (file, between(file, line))
       for file in ("metrics.jsonl", "events.jsonl", "starts.jsonl")
       for kind, line in LINES.items()},
    **{f"metrics.jsonl: {kind}": ("metrics.jsonl", between("metrics.jsonl", line))
       for kind, line in METRICS.items()},
    **{f"events.jsonl: {kind}": ("events.jsonl", between("events.jsonl", line))
       for kind, line in EVENTS.items()},
    **{f"starts.jsonl: {kind}": ("starts.jsonl", between("starts.jsonl", line))
       for kind, line in STARTS.items()},
    **{f"{file}: {kind}": (file, whole(file, data))
       for file in ("summary.json", "manifest.json") for kind, data in OBJECTS.items()},
    **{f"summary.json: {kind}": ("summary.json", whole("summary.json", data))
       for kind, data in SUMMARIES.items()},
    **{f"manifest.json: {kind}": ("manifest.json", whole("manifest.json", data))
       for kind, data in MANIFESTS.items()},
    **{f"config.toml: {kind}": ("config.toml", whole("config.toml", data))
       for kind, data in CONFIGS.items()},
    **{f"{file}: {kind}": (file, instead(file, make))
       for file in (*NAMES, STEP) for kind, make in PLACES.items()},
    **{f"rollouts: {kind}": (STEP, damage) for kind, damage in ROLLOUTS.items()},
}  # fmt: skip
HARMLESS: dict[str, Damage] = {
    **{f"metrics.jsonl: {kind}": between("metrics.jsonl", line)
       for kind, line in HARMLESS_METRICS.items()},
    **{f"events.jsonl: {kind}": between("events.jsonl", line)
       for kind, line in HARMLESS_EVENTS.items()},
    **{f"rollouts: {kind}": damage for kind, damage in HARMLESS_ROLLOUTS.items()},
    "config.toml: of another version": whole("config.toml", b"[tomorrow]\nsteps = 'many'\n"),
    "metrics.jsonl: empty": whole("metrics.jsonl", b""),
    "metrics.jsonl: a torn line alone": whole("metrics.jsonl", b'{"step'),
}  # fmt: skip
