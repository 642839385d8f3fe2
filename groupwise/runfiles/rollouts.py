"""Rollout files: one Parquet file a step, one row a sample. docs/run_folder.md has the schema.

The same rows give the same bytes: nothing in the file depends on the clock. Floats come back bit
for bit.
"""

from __future__ import annotations

import contextlib
import functools
import json
import keyword
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute as pc  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]

from groupwise.errors import RunError, in_short
from groupwise.runfiles.files import file_status, storable, write_atomic

if TYPE_CHECKING:
    from groupwise.records import Branch, Episode, Rollout, Turn, VersionRun

VERSION = 6  # of the schema; a change of a column's name, type or meaning raises it
# That is read as if it were of this version: in 1 the policy wrote all, in one turn; before 3
# there were no branches, and nothing of critics and implicit reward models was written; before 4
# the prompt was there as the model read it, not as the data have it, and nothing of teachers;
# before 5 there was nothing of experts, before 6 of environments.
OLDEST = 1
POLICY = "assistant"  # as in groupwise.records, which would load torch: readers need none
VERSION_KEY = b"groupwise.rollouts.version"
Numbers = Any  # one per token of the completion: a list, a numpy array, a CPU tensor without grad


@dataclass(frozen=True)
class Row:
    """One sample. None is what was not computed, or does not exist."""

    prompt_id: int
    draw: int
    group: int
    sample: int
    prompt_token_ids: Sequence[int]
    token_ids: Sequence[int]
    sampler_logp: Numbers
    mask: Numbers | None = None  # None: the policy wrote every token
    turns: Sequence[Turn] = ()  # none: one turn by the policy
    episode: Episode | None = None  # where an environment answered the policy
    branch: Branch | None = None  # of the group's sample of that number; None: it is that sample
    learner_logp: Numbers | None = None
    ref_logp: Numbers | None = None
    teacher_logp: Numbers | None = None
    entropy: Numbers | None = None
    advantage: Numbers | None = None
    coefficient: Numbers | None = None
    ratio: Numbers | None = None
    clipped: Numbers | None = None
    value: Numbers | None = None
    return_: Numbers | None = None
    process_reward: Numbers | None = None
    rerouted: Numbers | None = None
    routes: Any = None  # [prompt + completion - 1, layers, chosen], as the completion has them
    reward: float | None = None
    reward_parts: Mapping[str, float | None] = field(default_factory=dict)
    reward_steps: Sequence[tuple[int, float]] = ()
    correct: bool | None = None
    grader_status: str = "ok"
    grader_reason: str = ""
    finish: str = "eos"
    weight_version: int = 0
    weight_versions: Sequence[VersionRun] = ()  # none: `weight_version` wrote all of it
    weights: str = "shared"
    used: bool = True
    prompt: str | None = None  # of the data, a text or messages, as JSON
    prompt_text: str = ""
    text: str = ""
    answer: str | None = None

    @classmethod
    def of(
        cls, rollout: Rollout, *, group: int, prompt_text: str, used: bool = True, **streams: Any
    ) -> Row:
        """Make a row from a rollout and the learner's numbers for its tokens (learner_logp=...).

        At tokens that the policy did not write all of it is 0, whatever stands there.
        """
        task, done, grade = rollout.task, rollout.completion, rollout.grade
        sampler_logp: Numbers = done.logp_T
        if done.mask_T is not None:
            own_T = done.mask_T.numpy()
            sampler_logp, *rest = (_only(own_T, x) for x in (done.logp_T, *streams.values()))
            streams = dict(zip(streams, rest, strict=True))
        return cls(
            prompt_id=task.id,
            draw=rollout.draw,
            group=group,
            sample=rollout.sample,
            prompt_token_ids=task.token_ids,
            token_ids=done.token_ids,
            sampler_logp=sampler_logp,
            mask=done.mask_T,
            turns=done.turns,
            episode=done.episode,
            branch=rollout.branch,
            routes=None if done.routes_TLK is None else done.routes_TLK.numpy(),
            reward=grade.reward,
            reward_parts=grade.parts,
            reward_steps=grade.steps,
            correct=grade.correct,
            grader_status=grade.status,
            grader_reason=grade.reason,
            finish=done.finish,
            weight_version=done.version,
            weight_versions=done.runs,
            weights=done.weights,
            used=used,
            prompt=prompt_json(task.prompt),
            prompt_text=prompt_text,
            text=rollout.text,
            answer=None if task.answer is None else str(task.answer),
            **streams,
        )


def prompt_json(prompt: str | Sequence[Mapping[str, Any]]) -> str:
    """Write a prompt of the data as JSON, the same text for the same prompt."""
    plain = prompt if isinstance(prompt, str) else [dict(message) for message in prompt]
    return json.dumps(plain, ensure_ascii=False, sort_keys=True, default=str)


def field_of(column: str) -> str:
    """Return the field of a row that a column is made of: `return` is a word of Python's."""
    return f"{column}_" if keyword.iskeyword(column) else column


def _only(own_T: Numbers, values: Numbers | None) -> Numbers | None:
    if values is None:
        return None
    given = np.asarray(values)
    return np.where(own_T, given, given.dtype.type(0))


def _plain(kind: pa.DataType) -> Callable[[str, Sequence[Row]], pa.Array]:
    return lambda name, rows: pa.array([getattr(row, name) for row in rows], type=kind)


def _text(name: str, rows: Sequence[Row]) -> pa.Array:
    values = [getattr(row, name) for row in rows]
    return pa.array([None if x is None else storable(x) for x in values], type=pa.string())


def _parts(name: str, rows: Sequence[Row]) -> pa.Array:
    entries = [[(storable(key), x) for key, x in row.reward_parts.items()] for row in rows]
    return pa.array(entries, type=REWARD_PARTS)


def _steps(name: str, rows: Sequence[Row]) -> pa.Array:
    entries = [[{"end": end, "reward": x} for end, x in row.reward_steps] for row in rows]
    return pa.array(entries, type=REWARD_STEPS)


def _list(kind: pa.DataType) -> Callable[[str, Sequence[Row]], pa.Array]:
    """Join lists of numbers end to end without a Python object for each."""
    dtype = kind.to_pandas_dtype()

    def column(name: str, rows: Sequence[Row]) -> pa.Array:
        given = [getattr(row, field_of(name)) for row in rows]
        return _lists([None if x is None else np.asarray(x, dtype=dtype) for x in given], kind)

    return column


def _lists(parts: Sequence[Numbers | None], kind: pa.DataType) -> pa.Array:
    nothing = np.zeros(0, kind.to_pandas_dtype())
    known = [nothing if part is None else part for part in parts]
    ends = np.cumsum([0, *(len(part) for part in known)], dtype=np.int32)
    flat = np.concatenate([nothing, *known])
    absent = pa.array([part is None for part in parts], type=pa.bool_()) if parts else None
    return pa.ListArray.from_arrays(pa.array(ends), pa.array(flat, type=kind), mask=absent)


def _mask(name: str, rows: Sequence[Row]) -> pa.Array:
    full = [np.ones(len(row.token_ids), bool) if row.mask is None else row.mask for row in rows]
    return _lists([np.asarray(x, dtype=bool) for x in full], pa.bool_())


def _turns(name: str, rows: Sequence[Row]) -> pa.Array:
    entries = [
        [{**turn._asdict(), "role": storable(turn.role)} for turn in row.turns]
        or _one_turn(len(row.token_ids))
        for row in rows
    ]
    return pa.array(entries, type=TURNS)


def _episode(name: str, rows: Sequence[Row]) -> pa.Array:
    return pa.array([None if x.episode is None else _facts(x.episode) for x in rows], type=EPISODE)


def _facts(episode: Episode) -> dict[str, Any]:
    """Return all of an episode but how long its turns took: that never repeats."""
    return {
        "stop": episode.stop,
        "reward": episode.reward,
        "reason": storable(episode.reason),
        "left_out": episode.left_out,
        "messages": storable(json.dumps([dict(x) for x in episode.messages], ensure_ascii=False)),
        "turns": [
            {
                "reward": turn.reward,
                "finish": turn.finish,
                "version": turn.version,
                "state": None if turn.state is None else storable(turn.state),
                "calls": [
                    {key: storable(value) for key, value in call._asdict().items()}
                    for call in turn.calls
                ],
            }
            for turn in episode.turns
        ],
    }


def _seconds(name: str, rows: Sequence[Row]) -> pa.Array:
    known = [x.episode and [turn.seconds for turn in x.episode.turns] for x in rows]
    return pa.array(known, type=pa.list_(pa.float32()))


def _branch(name: str, rows: Sequence[Row]) -> pa.Array:
    entries = [None if row.branch is None else row.branch._asdict() for row in rows]
    return pa.array(entries, type=BRANCH)


def _routes(name: str, rows: Sequence[Row]) -> pa.Array:
    """Join the experts of all tokens end to end, with the sizes that they can be cut by."""
    known = [None if row.routes is None else np.asarray(row.routes) for row in rows]
    experts = _lists([None if x is None else x.ravel() for x in known], pa.int16())
    sizes = [
        pa.array([None if x is None else x.shape[axis] for x in known], type=pa.int32())
        for axis in (1, 2)
    ]
    absent = pa.array([x is None for x in known], type=pa.bool_())
    return pa.StructArray.from_arrays([*sizes, experts], fields=list(ROUTES), mask=absent)


def _versions(name: str, rows: Sequence[Row]) -> pa.Array:
    return pa.array([[run._asdict() for run in row.weight_versions] for row in rows], VERSIONS)


def _one_turn(length: int) -> list[dict[str, Any]]:
    """Return the one turn of a completion that the policy wrote alone."""
    return [{"role": POLICY, "start": 0, "end": length}]


def _step(step: int) -> Callable[[str, Sequence[Row]], pa.Array]:
    return lambda name, rows: pa.array([step] * len(rows), type=pa.int32())


REWARD_PARTS = pa.map_(pa.string(), pa.float64())
REWARD_STEPS = pa.list_(pa.struct([("end", pa.int32()), ("reward", pa.float64())]))
TURNS = pa.list_(pa.struct([("role", pa.string()), ("start", pa.int32()), ("end", pa.int32())]))
VERSIONS = pa.list_(
    pa.struct([("version", pa.int64()), ("tokens", pa.int32()), ("pure", pa.bool_())])
)
_CALL = pa.struct([("name", pa.string()), ("arguments", pa.string()), ("status", pa.string())])
_OWN_TURN = pa.struct(
    [("reward", pa.float64()), ("finish", pa.string()), ("version", pa.int64()),
     ("state", pa.string()), ("calls", pa.list_(_CALL))]
)  # fmt: skip
EPISODE = pa.struct(
    [("stop", pa.string()), ("reward", pa.float64()), ("reason", pa.string()),
     ("left_out", pa.bool_()), ("messages", pa.string()), ("turns", pa.list_(_OWN_TURN))]
)  # fmt: skip
BRANCH = pa.struct([("at", pa.int32()), ("number", pa.int32())])
ROUTES = pa.struct(
    [("layers", pa.int32()), ("chosen", pa.int32()), ("experts", pa.list_(pa.int16()))]
)
_INT32, _INT64, _FLOAT32, _BOOL = pa.int32(), pa.int64(), pa.float32(), pa.bool_()

# What every row of a file has.
_NEVER_ABSENT = ("prompt_id", "draw", "group", "sample", "prompt_token_ids", "token_ids", "mask",
                 "turns", "sampler_logp")  # fmt: skip
# What every file has, and may say nothing in.
_MAY_BE_NULL = ("text", "reward", "reward_parts", "correct", "grader_status", "grader_reason")
# Lists as long as the completion; all others of their kind are absent as a whole (null) or whole.
PER_TOKEN = ("mask", "sampler_logp", "learner_logp", "ref_logp", "entropy", "advantage",
             "coefficient", "ratio", "clipped", "value", "return",
             "process_reward", "teacher_logp", "rerouted")  # fmt: skip
_FLOATS = tuple(name for name in PER_TOKEN if name not in ("mask", "clipped"))
_TEXTS = ("grader_status", "grader_reason", "finish", "weights", "prompt", "prompt_text", "text",
          "answer")  # fmt: skip

_COLUMNS: dict[str, Callable[[str, Sequence[Row]], pa.Array]] = {
    "prompt_id": _plain(_INT64),
    "draw": _plain(_INT32),
    "group": _plain(_INT64),
    "sample": _plain(_INT32),
    "branch": _branch,
    "prompt_token_ids": _list(_INT32),
    "token_ids": _list(_INT32),
    "mask": _mask,
    "turns": _turns,
    "episode": _episode,
    "turn_seconds": _seconds,
    **{name: _list(_FLOAT32) for name in _FLOATS},
    "clipped": _list(_BOOL),
    "routes": _routes,
    "reward": _plain(pa.float64()),
    "reward_parts": _parts,
    "reward_steps": _steps,
    "correct": _plain(_BOOL),
    "grader_status": _text,
    "grader_reason": _text,
    "finish": _text,
    "weight_version": _plain(_INT64),
    "weights": _text,
    "used": _plain(_BOOL),
    "prompt": _text,
    "prompt_text": _text,
    "text": _text,
    "answer": _text,
}


def to_table(rows: Sequence[Row], step: int) -> pa.Table:
    """Return the rows as columns, checked: a list per token is as long as its completion."""
    for number, row in enumerate(rows):
        for name in PER_TOKEN:
            values = getattr(row, field_of(name))
            if values is not None and len(values) != len(row.token_ids):
                raise RunError(
                    f"Row {number} of step {step} has {len(values)} values of {name} for "
                    f"{len(row.token_ids)} tokens: one for each token of the completion, or None."
                )
    columns = {"step": _step(step), **_COLUMNS}
    if any(row.weight_versions for row in rows):  # else the file is as older readers know it
        columns["weight_versions"] = _versions
    table = pa.table({name: make(name, rows) for name, make in columns.items()})
    return table.replace_schema_metadata({VERSION_KEY: str(VERSION).encode()})


def write(path: Path, rows: Sequence[Row], step: int) -> None:
    """Write the whole file or none; durable on return."""
    store(path, to_table(rows, step))


def store(path: Path, table: pa.Table) -> None:
    """Write a table of `to_table` or `read`, perhaps with other columns, as a file."""
    sink = pa.BufferOutputStream()
    pq.write_table(
        table,
        sink,
        compression="zstd",
        # Few different experts: as numbers in a dictionary they take a few bits each.
        use_dictionary=[*_TEXTS, "reward_parts.key_value.key", "routes.experts.list.element"],
        # The bytes of a float apart: exponents repeat, and compress.
        column_encoding={f"{name}.list.element": "BYTE_STREAM_SPLIT" for name in _FLOATS},
    )
    write_atomic(path, sink.getvalue().to_pybytes())


def with_lists(table: pa.Table, columns: Mapping[str, Sequence[Numbers | None]]) -> pa.Table:
    """Return the table with these lists per token in place of its own, or beside them; by row."""
    for name, lists in columns.items():
        kind = _BOOL if name == "clipped" else _FLOAT32
        dtype = kind.to_pandas_dtype()
        made = _lists([None if x is None else np.asarray(x, dtype=dtype) for x in lists], kind)
        at = table.schema.get_field_index(name)
        table = table.append_column(name, made) if at < 0 else table.set_column(at, name, made)
    return table


def read(path: str | os.PathLike[str], columns: Sequence[str] | None = None) -> pa.Table:
    """Read a step's rows, or some columns of them, as far as the file has them.

    What files of older versions can't hold is filled in.
    """
    path = Path(path)
    with _opened(path) as file:
        found = _version(file)
        if not OLDEST <= found <= VERSION:
            raise _other_version(path, found)
        table = _some(file, columns)
        if columns is None or "turns" in columns:
            table = _with_turns(table, file)
        if (columns is None or "branch" in columns) and "branch" not in table.column_names:
            table = table.append_column("branch", pa.nulls(table.num_rows, BRANCH))
        for name in _MAY_BE_NULL:
            if name in (columns or ()) and name not in table.column_names:
                raise pa.ArrowInvalid(f"rows without {name}")
        for name in _NEVER_ABSENT:
            asked = columns is None or name in columns
            if asked and (name not in table.column_names or table.column(name).null_count):
                raise pa.ArrowInvalid(f"rows without {name}")
        return table


def read_older(path: Path, columns: Sequence[str]) -> tuple[pa.Table, int]:
    """Read some columns of a file of this version or an older one, and its version, for showing.

    What the file does not have, and can't be filled in, is null.
    """
    with _opened(path) as file:
        found = _version(file)
        if found > VERSION:
            raise _other_version(path, found)
        table = _some(file, columns)
        if "turns" in columns:
            table = _with_turns(table, file)
    for name in columns:
        if name not in table.column_names:
            table = table.append_column(name, pa.nulls(table.num_rows))
    return table.select(list(columns)), found


def read_answers(path: Path, columns: Sequence[str]) -> tuple[pa.Table, int]:
    """Read the same of the answers alone, without branches of them."""
    table, found = read_older(path, (*columns, "branch"))
    return table.filter(pc.is_null(table.column("branch"))).select(list(columns)), found


def _with_turns(table: pa.Table, file: pq.ParquetFile) -> pa.Table:
    """Return the table of a file without turns, with the one that each of its completions was."""
    if "turns" in table.column_names or "token_ids" not in file.schema_arrow.names:
        return table
    lengths = pc.list_value_length(_some(file, ["token_ids"]).column("token_ids")).to_pylist()
    turns = pa.array([_one_turn(length or 0) for length in lengths], type=TURNS)
    return table.append_column("turns", turns)


def _some(file: pq.ParquetFile, columns: Sequence[str] | None) -> pa.Table:
    """Return the columns as the schema has them; other types and torn lists are an Arrow error."""
    there = file.schema_arrow.names
    table = file.read(columns=[name for name in columns or there if name in there])
    table.validate(full=True)
    for at, (name, found) in enumerate(zip(table.column_names, table.schema.types, strict=True)):
        kind = found if pa.types.is_null(found) else _types().get(name, found)
        if found != kind:
            table = table.set_column(at, name, table.column(at).cast(kind))
        if pa.types.is_list(kind) and pc.list_flatten(table.column(at)).null_count:
            raise pa.ArrowInvalid(f"there are nulls within the lists of {name}")
    return table


@functools.cache
def _types() -> dict[str, pa.DataType]:
    """Return the type of every column; `weight` is in files of a replay."""
    ours = to_table([], 0).schema
    return {**dict(zip(ours.names, ours.types, strict=True)), "weight": pa.list_(_FLOAT32)}


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[pq.ParquetFile]:
    nothing = RunError(
        f"There are no rollouts at {path}: the step was not reached, or the file was removed."
    )
    if file_status(path) is None:
        raise nothing
    try:
        # Opened here: Arrow takes no name that is not UTF-8.
        with open(path, "rb") as data, pq.ParquetFile(data) as file:
            yield file
    except FileNotFoundError:  # it went away in between
        raise nothing from None
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:  # the last: column names
        raise RunError(
            f"{path} is not a Parquet file that can be read ({in_short(error)}). It is "
            "written in one piece, so it was changed since or the disk is faulty. Put it back, or "
            "remove it to do without this step."
        ) from error


def _version(file: pq.ParquetFile) -> int:
    """Return the file's version, 0 where it does not say."""
    said = (file.schema_arrow.metadata or {}).get(VERSION_KEY, b"0")
    return int(said) if said.isdigit() else 0


def _other_version(path: Path, found: int) -> RunError:
    return RunError(
        f"{path} has rollout schema {found or 'none'}, this groupwise reads {OLDEST} "
        f"to {VERSION}. Read it "
        "with the groupwise that wrote it (manifest.json names the version), or with pyarrow."
    )
