"""Damaged files of every kind that the package reads, and what reading them comes to.

`attack(kind, tries)` takes a whole file of that kind, damages it once a try, reads it as a run
would, and counts what came of it. What is drawn depends on the seed alone.
"""

from __future__ import annotations

import copy
import importlib.util
import json
import random
import signal
import struct
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import damage_scorers
import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
import torch
from family_zoo import FAMILIES
from gguf_files import gguf_tensors, metadata
from gguf_files import write as write_gguf
from model_zoo import CONFIGS, hidden, make
from task_files import read as read_tasks
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from groupwise import load_config
from groupwise.data.templates import template_text
from groupwise.errors import GroupwiseError
from groupwise.model.adapters import lora as adapters
from groupwise.model.adapters import peft_files
from groupwise.model.adapters.targets import Spec
from groupwise.model.formats.checkpoint import load, save, stored_shape
from groupwise.model.layers.linear import layer_sizes
from groupwise.model.policy import base_of
from groupwise.sync import checkpoints as states

CPU_SECONDS = 20  # of one reading: more is a hang
CHAT = [{"role": "user", "content": "1+2"}]
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] | trim }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


class Tally(NamedTuple):
    """What came of damaged files of one kind."""

    kind: str
    tried: int
    errors: int  # in words: a GroupwiseError
    loaded: int
    tracebacks: list[str]  # anything else, with the seed of the try
    slowest: float  # seconds of the processor


# --- damage -----------------------------------------------------------------------------------

NUMBERS = [0, 1, 2, 7, 31, 2**8 - 1, 2**16, 2**31 - 1, 2**32, 2**40, 2**62, 2**63, 2**64 - 1]
DEEP = "@deep@"  # json.dumps itself can't write what stands in its place
ODD: list[Any] = [
    None, True, False, 0, 1, -1, 3, 10**6, 2**31, 2**63, -(2**63), 10**400, 0.5, -0.0, 1e308,
    float("nan"), float("inf"), -float("inf"), "", "x", "true", "10", "\0", "\ud800", "é" * 5000,
    [], [None], [0], ["x"], [[1, 2]], {}, {"x": 1}, {"content": None}, {"content": 3}, DEEP,
    "{{ x.y.z }}", "{% for", "{{ 'x' * 10**9 }}", "../../etc/passwd", "/dev/zero",
]  # fmt: skip


def damaged_bytes(raw: bytes, draw: random.Random) -> bytes:
    """Flip, drop, repeat or insert bytes, cut the file off, or put a striking number into it."""
    data, how = bytearray(raw), draw.randrange(7)
    # Headers are small and matter most: half of all damage is there.
    at = draw.randrange(min(len(data), 4096) if draw.random() < 0.5 else len(data))
    length = draw.choice([1, 1, 2, 8, 100])
    if how == 0:
        data[at] ^= 1 << draw.randrange(8)
    elif how == 1:
        del data[at : at + length]
    elif how == 2:
        data[at:at] = draw.randbytes(length)
    elif how == 3:
        del data[at:]
    elif how == 4:
        data[at:at] = data[at : at + length] * draw.choice([1, 2, 1000])
    elif how == 5:
        data[at : at + length] = bytes([draw.choice([0, 255])]) * length
    else:
        data[at : at + 8] = struct.pack("<Q", draw.choice(NUMBERS))
    return bytes(data)


def damaged_json(raw: bytes, draw: random.Random) -> bytes:
    """Replace, remove, rename or wrap one value of the tree; sometimes damage the bytes."""
    if draw.random() < 0.25:
        return damaged_bytes(raw, draw)
    tree = json.loads(raw)
    holder, key = draw.choice([(None, None), *_places(tree)] if tree else [(None, None)])
    if holder is None:
        tree = draw.choice(ODD)
    else:
        how = draw.randrange(8)
        if how == 0:
            del holder[key]
        elif how == 1 and isinstance(holder, dict):
            holder[f"{key}_"] = holder.pop(key)
        elif how == 2:
            holder[key] = [holder[key]]
        elif how == 3:
            holder[key] = {"x": holder[key]}
        elif how == 4:
            other_holder, other = draw.choice(list(_places(tree)))
            holder[key] = copy.deepcopy(other_holder[other])
        else:
            holder[key] = draw.choice(ODD)
    text = json.dumps(tree).replace(f'"{DEEP}"', "[" * 100_000 + "]" * 100_000)
    return text.encode("utf-8", "surrogatepass")


def _places(tree: Any) -> list[tuple[Any, Any]]:
    """Every holder and key of the tree; of long lists the first few and the last."""
    if not isinstance(tree, dict | list):
        return []
    keys = list(tree) if isinstance(tree, dict) else [*range(min(len(tree), 3)), len(tree) - 1]
    keys = keys if tree else []
    return [(tree, k) for k in keys] + [p for k in keys for p in _places(tree[k])]


def damaged_text(raw: bytes, draw: random.Random) -> bytes:
    """Swap, repeat or remove lines, or damage the bytes."""
    lines = raw.split(b"\n")
    how, at = draw.randrange(6), draw.randrange(len(lines))
    if how == 0:
        lines.insert(at, draw.choice(lines))
    elif how == 1:
        name, equals, _ = lines[at].partition(b"=")
        value = draw.choice(ODD)
        text = "[" * 100_000 + "]" * 100_000 if value == DEEP else json.dumps(value)
        lines[at] = name + (equals or b":") + text.encode()
    elif how == 2:
        del lines[at]
    else:
        return damaged_bytes(raw, draw)
    return b"\n".join(lines)


TEMPLATES = [
    "{% for i in range(10**9) %}x{% endfor %}",
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{{ 'x' * 10**10 }}",
    "{{ 10 ** (10 ** 10) }}",
    "{% set n = namespace(x='x') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(90) }}",
    "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
    "{{ 'x' | center(10**10) }}",
    "{{ '%010000000000d' % 1 }}",
    "{{ '{:10000000000}'.format(1) }}",
    "{{ lipsum(n=10**9) }}",
    "{{ ''.__class__.__mro__ }}",
    "{{ messages[7].content.x.y }}",
    "{{ 1 / 0 }}",
    "{{ messages | tojson(indent='x') }}",
    "{{ raise_exception(messages) }}",
    "{% include '/etc/passwd' %}",
]


def damaged_template(raw: bytes, draw: random.Random) -> bytes:
    """Damage the text; once in a hundred, a template that never ends or fills the memory."""
    if draw.random() < 0.01:
        return draw.choice(TEMPLATES).encode()
    return damaged_bytes(raw, draw)


# --- whole files, and how a run reads them ----------------------------------------------------


class Kind(NamedTuple):
    make: Callable[[Path], Path]  # writes all that belongs together; the file to damage
    damage: Callable[[bytes, random.Random], bytes]
    read: Callable[[Path], Any]  # given the folder


def _tokenizer_files() -> dict[str, bytes]:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())[:90]
    alphabet += sorted({*"user: 12+\n"} - {*alphabet} - {" ", "\n"})
    vocabulary = {c: i for i, c in enumerate(dict.fromkeys(["Ġ", "Ċ", *alphabet]))}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(x, special=True) for x in ("<s>", "</s>")])
    number = backend.token_to_id("</s>")
    settings = {
        "bos_token": {"__type": "AddedToken", "content": "<s>", "lstrip": False},
        "eos_token": "</s>",
        "chat_template": [{"name": "default", "template": TEMPLATE}],
        "model_max_length": 2048,
        "added_tokens_decoder": {"0": {"content": "<s>", "special": True}},
    }
    ends = {"eos_token_id": [number], "bos_token_id": 0, "pad_token_id": 0, "temperature": 0.6}
    return {
        "tokenizer.json": backend.to_str(pretty=True).encode(),
        "tokenizer_config.json": json.dumps(settings, indent=1).encode(),
        "special_tokens_map.json": json.dumps(
            {"eos_token": "</s>", "pad_token": {"content": "</s>"}}
        ).encode(),
        "generation_config.json": json.dumps(ends).encode(),
    }


def _model(folder: Path, name: str = "llama3", **options: Any) -> None:
    model = make(name)
    raw = CONFIGS[name] | {"eos_token_id": 2, "torch_dtype": "float32", "hidden_act": "silu"}
    files = _tokenizer_files() | {"config.json": json.dumps(raw).encode()}
    save(model, folder / "model", files, **options)


def _of_model(name: str) -> Callable[[Path], Path]:
    def made(folder: Path) -> Path:
        _model(folder, shard_bytes=60_000 if "index" in name else 2**30)
        if name == "chat_template.jinja":
            (folder / "model" / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
            (folder / "model" / name).write_text(TEMPLATE)
        return folder / "model" / name

    return made


def _use(path: Path) -> None:
    """Load a model and do with it what every run does."""
    loaded = load(path)
    tokens = loaded.tokenizer.encode("1+2")
    loaded.tokenizer.decode(tokens)
    loaded.tokenizer.decode_all([[0, 1, 96]])
    if loaded.tokenizer.template is not None:
        loaded.tokenizer.prompt(CHAT)
    with torch.no_grad():
        hidden(loaded.model, [torch.tensor([1, 2, 3])])


def _borrowed(folder: Path) -> Path:
    (folder / "model").mkdir()
    raw = FAMILIES["gemma2"] | {"model_type": "gemma2"}
    (folder / "model" / "config.json").write_text(json.dumps(raw))
    return folder / "model" / "config.json"


def _gguf(folder: Path) -> Path:
    model = make("smollm2")
    write_gguf(folder / "model.gguf", metadata(model, "llama"), gguf_tensors(model, "llama"))
    return folder / "model.gguf"


def _adapter(name: str) -> Callable[[Path], Path]:
    def made(folder: Path) -> Path:
        model, spec = make("llama3"), Spec(rank=2, alpha=4.0, targets="all", rslora=False)
        adapters.attach(model, spec, seed=0)
        base = {"path": str(folder), "dtype": "float32", "adapters": []}
        files = {
            peft_files.CONFIG: peft_files.config_bytes(model, spec, "base", 0.0),
            peft_files.BASE: json.dumps(base).encode(),
        }
        peft_files.save(model, folder / "adapter", files)
        return folder / "adapter" / name

    return made


def _read_adapter(folder: Path) -> None:
    base_of(folder / "adapter")
    peft_files.read(folder / "adapter", layer_sizes(make("llama3")))


def _run(folder: Path) -> Path:
    values = {"step": 3, "cursor": {"epoch": 0, "seen": [1, 2]}, "best": None}
    tensors = {"optimizer": {"m": torch.zeros(4)}}
    made = states.snapshot(
        3, weights=states.policy_contents(make("qwen2"), {}), tensors=tensors, values=values
    )
    return states.write(folder / "checkpoints", made, keep=2) / "resume" / "state.json"


TOML = """
recipe.name = "dapo"
group_size = 4
steps = 10
recipe.gate.high = 0.3
data.train = "sums"
reward.parts = {exact = 1.0}
[model]
path = "tiny"
[engine]
max_tokens = 8
temperature = 1.0
[optim]
learning_rate = 1e-4
"""
ROWS = [{"prompt": f"What is {i} + 1?", "answer": str(i + 1), "n": i} for i in range(40)]


def _written(name: str, write: Callable[[Path], Any]) -> Callable[[Path], Path]:
    def made(folder: Path) -> Path:
        write(folder / name)
        return folder / name

    return made


def _data(name: str, write: Callable[[Path], Any], damage: Any = damaged_bytes) -> Kind:
    made = _written(name, write)
    return Kind(made, damage, lambda folder: read_tasks(str(folder / name)))


def _lines() -> bytes:
    return "".join(json.dumps(row) + "\n" for row in ROWS).encode()


def _packed(codec: str) -> Callable[[Path], Any]:
    return lambda path: path.write_bytes(pa.compress(_lines(), codec=codec, asbytes=True))


def _separated(path: Path) -> None:
    rows = "".join(f"{r['prompt']},{r['answer']},{r['n']}\n" for r in ROWS)
    path.write_text("prompt,answer,n\n" + rows)


def _stream(path: Path) -> None:
    table = pa.Table.from_pylist(ROWS)
    with pa.ipc.new_stream(str(path), table.schema) as stream:
        stream.write_table(table, max_chunksize=20)


def _saved(folder: Path) -> Path:
    (folder / "saved").mkdir()
    _stream(folder / "saved" / "data.arrow")
    listed = {"_data_files": [{"filename": "data.arrow"}], "_split": "train"}
    (folder / "saved" / "state.json").write_text(json.dumps(listed))
    return folder / "saved" / "state.json"


def _in_model(folder: Path) -> None:
    _use(folder / "model")


KINDS: dict[str, Kind] = {
    **{
        name: Kind(_of_model(name), damaged_json, _in_model)
        for name in (
            "config.json",
            "generation_config.json",
            "tokenizer_config.json",
            "special_tokens_map.json",
            "tokenizer.json",
            "model.safetensors.index.json",
        )
    },
    "config.json of a borrowed model": Kind(
        _borrowed, damaged_json, lambda folder: stored_shape(folder / "model")
    ),
    "chat_template.jinja": Kind(_of_model("chat_template.jinja"), damaged_template, _in_model),
    "model.safetensors": Kind(_of_model("model.safetensors"), damaged_bytes, _in_model),
    "model.gguf": Kind(_gguf, damaged_bytes, lambda folder: _use(folder / "model.gguf")),
    "adapter_config.json": Kind(_adapter(peft_files.CONFIG), damaged_json, _read_adapter),
    "adapter_model.safetensors": Kind(_adapter(peft_files.TENSORS), damaged_bytes, _read_adapter),
    "groupwise_base.json": Kind(_adapter(peft_files.BASE), damaged_json, _read_adapter),
    "resume/state.json": Kind(
        _run, damaged_json, lambda folder: states.load_latest(folder / "checkpoints")
    ),
    "config.toml": Kind(
        _written("config.toml", lambda path: path.write_text(TOML)),
        damaged_text,
        lambda folder: load_config(folder / "config.toml"),
    ),
    "template.txt": Kind(
        _written("template.txt", lambda path: path.write_text("Q: {prompt}\nA:")),
        damaged_bytes,
        lambda folder: template_text(str(folder / "template.txt")),
    ),
    "data.jsonl": _data("data.jsonl", lambda path: path.write_bytes(_lines())),
    "data.json": _data("data.json", lambda path: path.write_text(json.dumps(ROWS)), damaged_json),
    "data.csv": _data("data.csv", _separated),
    "data.jsonl.gz": _data("data.jsonl.gz", _packed("gzip")),
    "data.jsonl.zst": _data("data.jsonl.zst", _packed("zstd")),
    "data.parquet": _data("data.parquet", lambda p: pq.write_table(pa.Table.from_pylist(ROWS), p)),
    "data.arrow": _data("data.arrow", _stream),
    "data.feather": _data(
        "data.feather", lambda p: feather.write_feather(pa.Table.from_pylist(ROWS), str(p))
    ),
    "state.json of a saved data set": Kind(
        _saved, damaged_json, lambda folder: read_tasks(str(folder / "saved"))
    ),
    "config.json of a classifier": Kind(
        damage_scorers.whole("token", "config.json"), damaged_json, damage_scorers.exported
    ),
    "model.safetensors of a classifier": Kind(
        damage_scorers.whole("sequence", "model.safetensors"),
        damaged_bytes,
        damage_scorers.exported,
    ),
    "config.json of a critic": Kind(
        damage_scorers.whole("token", "config.json"), damaged_json, damage_scorers.critic
    ),
    "model.safetensors of a critic": Kind(
        damage_scorers.whole("token", "model.safetensors"), damaged_bytes, damage_scorers.critic
    ),
    **{
        f"{name} of a scorer's adapter": Kind(
            damage_scorers.adapter(name), damage, damage_scorers.exported
        )
        for name, damage in (
            (peft_files.CONFIG, damaged_json),
            (peft_files.TENSORS, damaged_bytes),
            ("groupwise_scorer.json", damaged_json),
        )
    },
    **{
        f"{name} of {part}": Kind(
            damage_scorers.whole(kind, name), damage, damage_scorers.graded(part)
        )
        for part, kind, name, damage in (
            ("rm", "sequence", "config.json", damaged_json),
            ("rm", "sequence", "model.safetensors", damaged_bytes),
            ("rm", "sequence", "tokenizer.json", damaged_json),
            ("prm", "token", "config.json", damaged_json),
            ("prm", "token", "tokenizer_config.json", damaged_json),
        )
        if importlib.util.find_spec("transformers") is not None
    },
    "resume/critic.safetensors": Kind(
        damage_scorers.checkpoint_of_two,
        damaged_bytes,
        lambda folder: states.load_latest(folder / "checkpoints"),
    ),
    "rollouts of a step": Kind(damage_scorers.branched, damaged_bytes, damage_scorers.replayed),
}


# --- the attack -------------------------------------------------------------------------------


def attack(kind: str, tries: int, seed: int = 0) -> Tally:
    """Damage a file of this kind so many times, read each, and count what came of it."""
    made = KINDS[kind]
    errors, loaded, slowest, bad = 0, 0, 0.0, []
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        file = made.make(folder)
        raw = file.read_bytes()
        made.read(folder)  # undamaged it must load
        for number in range(tries):
            file.write_bytes(made.damage(raw, random.Random(f"{seed} {number}")))
            began = time.process_time()
            try:
                with _limited(), warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    made.read(folder)
                loaded += 1
            except GroupwiseError:
                errors += 1
            except KeyboardInterrupt:
                raise
            except BaseException as error:  # a panic of Rust is no Exception
                last = traceback.extract_tb(error.__traceback__)[-1]
                where = f"{Path(last.filename).name}:{last.lineno}"
                bad.append(f"{number}: {type(error).__name__}: {str(error)[:100]} ({where})")
            slowest = max(slowest, time.process_time() - began)
    return Tally(kind, tries, errors, loaded, bad, slowest)


@contextmanager
def _limited() -> Iterator[None]:
    """Raise where reading takes more of the processor than any file is worth."""

    def stop(number: int, frame: Any) -> None:
        raise TimeoutError(f"more than {CPU_SECONDS} s of the processor")

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


if __name__ == "__main__":
    for name in sys.argv[2:] or KINDS:
        tally = attack(name, int(sys.argv[1]))
        print(*tally[:4], len(tally.tracebacks), f"{tally.slowest:.2f} s", sep=" | ", flush=True)
        for line in tally.tracebacks[:20]:
            print("   ", line)
