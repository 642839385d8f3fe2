"""What the GPU benchmarks are made of, on the CPU: rewards, pieces of models, rows."""

from __future__ import annotations

import json
import math
import string
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from groupwise.config import load as load_config
from groupwise.model.config import ModelConfig
from groupwise.model.cost import active_parameters, parameters
from groupwise.model.devices import Device
from groupwise.model.formats.checkpoint import Loaded, load, save
from groupwise.model.formats.tokenizer import Tokenizer, character_files
from groupwise.model.layers.transformer import Transformer
from groupwise.records import Grade, Task
from groupwise.runfiles.rollouts import Row, write
from groupwise.watch import speed

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import afterwards
import apples
import gpu
import gpu_sft
import graders
import growth
import gsm8k_reward
import losses
import moe
import shapes
import unpack
import written

SMALL: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 101,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
}
FILES = character_files("ab")
CPU = ["--device", "cpu", "--dtype", "float32", "--prompts", "2", "--repeats", "2"]


@pytest.mark.parametrize(
    ("text", "answer", "strict", "lenient"),
    [
        ("so 70 + 2\n#### 72<|im_end|>", "72", 1, 1),
        ("#### $1,234.50", "1234.5", 1, 1),
        ("#### 1,234", "1,234", 1, 1),
        ("####-5", "-5", 1, 1),
        ("The answer is 72.", "72", 0, 1),
        ("#### 71\n#### 72", "72", 1, 1),
        ("#### 72\n#### 71", "72", 0, 0),
        ("#### 72, and not 71", "72", 1, 0),
        ("#### **72**", "72", 0, 1),
        ("### 72", "72", 0, 1),
        ("10-5", "5", 0, 1),  # a range or a difference: no sign
        ("it is -5", "-5", 0, 1),
        ("####\n\n .5", "0.5", 1, 1),
        ("#### 72.0000001", "72", 1, 1),
        ("#### 72.001", "72", 0, 0),
        ("", "72", 0, 0),
        ("####", "0", 0, 0),
    ],
)
def test_gsm8k_rewards(text: str, answer: str, strict: float, lenient: float) -> None:
    assert gsm8k_reward.strict(text, answer) == strict
    assert gsm8k_reward.lenient(text, answer) == lenient


def test_apples() -> None:
    row = apples.row(6)
    assert "9 apples and buys 13 boxes of 8 apples each. He gives away 1 apples" in str(row)
    assert row["answer"] == str(9 + 13 * 8 - 1)
    assert apples.last_number("13 * 8 = 104, so 112", "112") == 1.0
    assert apples.last_number("112 = 9 + 103", "112") == 0.0
    assert apples.last_number("none", "112") == 0.0


def random_model(**changes: Any) -> Transformer:
    config = ModelConfig.from_hf(SMALL | changes)
    return Transformer(config).initialise(torch.Generator().manual_seed(1), std=0.3)


def in_pieces(model: Transformer, folder: Path, size: int, head: str) -> None:
    """Float32 tensors under GGUF's names, rows of queries and keys as its converter has them."""
    entries, data = [], b""
    config = model.config
    parts = {hf: gguf for gguf, hf in GGUF_PARTS.items()}
    for name, x in model.state_dict().items():
        if name.startswith("model.layers."):
            _, _, layer, *middle, kind = name.split(".")
            part = parts[".".join(middle)]
            stored = f"blk.{layer}.{part}.{kind}"
            heads = {"attn_q": config.num_heads, "attn_k": config.num_kv_heads}.get(part)
            if heads and config.family == "llama":
                width = x.shape[0] // heads
                # row 2i of a head is its row i, row 2i + 1 its row i + W/2
                order = [i // 2 + (i % 2) * (width // 2) for i in range(width)]
                x = x.view(heads, width, *x.shape[1:])[:, order].reshape(x.shape)
        else:
            stored = head if "embed" in name else "output_norm.weight"
        raw = x.numpy().tobytes()
        entries.append({"name": stored, "type": 0, "offset": len(data), "size": len(raw)})
        data += raw
    folder.mkdir()
    (folder / "toy.json").write_text(json.dumps(entries))
    for number, at in enumerate(range(0, len(data), size)):
        (folder / f"toy.part.{number:02d}").write_bytes(data[at : at + size])
    (folder / "toy_tok").mkdir()
    for file, content in character_files("ab").items():
        (folder / "toy_tok" / file).write_bytes(content)


GGUF_PARTS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


@pytest.mark.parametrize(
    ("family", "head"), [("llama", "token_embd.weight"), ("qwen2", "output.weight")]
)
def test_pieces_become_the_model(
    family: str, head: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = SMALL | {"model_type": family}
    monkeypatch.setitem(unpack.CONFIGS, "toy", raw)
    monkeypatch.setitem(unpack.GENERATION, "toy", {"eos_token_id": [0, 1]})
    monkeypatch.setattr(unpack, "CHUNK", 100)  # several threads a tensor
    model = random_model(model_type=family)
    in_pieces(model, tmp_path / "pieces", 5_000, head)
    found = load(unpack.unpack_model("toy", tmp_path / "pieces", tmp_path))
    assert found.tokenizer.eos_ids == (0, 1)
    for name, x in model.state_dict().items():
        assert torch.equal(found.model.state_dict()[name], x.to(torch.bfloat16)), name


def test_a_missing_piece_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(unpack.CONFIGS, "toy", SMALL)
    in_pieces(random_model(), tmp_path / "pieces", 5_000, "token_embd.weight")
    (tmp_path / "pieces" / "toy.part.01").unlink()
    with pytest.raises(SystemExit, match="Bring the missing ones"):
        unpack.unpack_model("toy", tmp_path / "pieces", tmp_path)


def test_mismatch_of_a_step(tmp_path: Path) -> None:
    def row(sampler: list[float], learner: list[float], used: bool = True) -> Row:
        ids = list(range(len(sampler)))
        return Row(0, 0, 0, 0, [1], ids, sampler, learner_logp=learner, used=used)

    rows = [row([-1.0, -2.0], [-1.5, -2.0]), row([-1.0], [-0.75]), row([-1.0], [-9.0], False)]
    write(tmp_path / "step_1.parquet", rows, 1)
    found = afterwards.mismatch(tmp_path / "step_1.parquet")
    assert found["mean"] == pytest.approx(0.25)
    assert found["max"] == pytest.approx(0.5)
    assert found["p99"] == pytest.approx(0.495)


def test_floors_beside_a_step_by_hand(tmp_path: Path) -> None:
    """Two groups were sampled and one was learned from, on a device with round peaks."""

    def row(group: int, prompt: int, length: int, used: bool) -> Row:
        ids = list(range(length))
        return Row(0, 0, group, 0, [1] * prompt, ids, [0.0] * length, used=used)

    file = tmp_path / "step_1.parquet"
    write(file, [row(0, 10, 2, True), row(0, 10, 1, True), row(1, 5, 1, False)], 1)
    model = random_model()
    loaded = Loaded(model, Tokenizer.from_files(FILES), FILES)
    layer = 16 * (4 + 2 + 2 + 4) * 4 + 3 * 16 * 32  # head width 4
    layers, head, pair, cached = 2 * layer, 101 * 16, 4 * 2 * 16, 2 * 2 * 2 * 4
    metrics = {"updates/count": 3.0, "time/rollout": 7.0, "time/update": 8.0}
    metrics["time/update_flops_share"] = 0.25

    def beside(flops: float, bandwidth: float) -> dict[str, Any]:
        device = Device("toy", flops, bandwidth)
        return afterwards.beside_roofline(loaded, file, metrics, 0, device)

    only_flops = beside(1.0, float("inf"))
    # Prompts once; then each token sees the prompt, those before it and itself.
    prompts = 2 * layers * 15 + pair * (55 + 15)
    decoded = 2 * (layers + head) * 4 + pair * (11 + 12 + 11 + 6)
    assert only_flops["rollout_roofline_seconds"] == prompts + decoded
    # The last token of a completion is predicted and never read.
    learned = 2 * layers * (10 + 1) + 2 * head * 3 + pair * (55 + 11)
    optimizer = 3 * 15 * sum(p.numel() for p in model.parameters())
    assert only_flops["update_roofline_seconds"] == 3 * learned + optimizer
    only_bytes = beside(float("inf"), 1.0)
    # Prompts: weights once, keys and values written. Two steps: weights, the prompts as long as one
    # of the group runs, every token's own.
    moved = 4 * (3 * layers + 2 * head + cached * (15 + 2 * 10 + 5 + 3 + 1 + 1))
    assert only_bytes["rollout_roofline_seconds"] == moved
    assert only_bytes["completion_tokens"] == 4
    assert only_bytes["update_model_flop_utilisation"] == 0.25  # as the run itself has it
    unknown = afterwards.beside_roofline(loaded, file, metrics, 0, Device("cpu", None, None))
    assert unknown["update_roofline_seconds"] is unknown["rollout_roofline_seconds"] is None


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small chat model over characters."""
    files = character_files(string.printable)
    files["chat_template.jinja"] = b"{% for m in messages %}{{ m['content'] }}\n{% endfor %}"
    folder = tmp_path_factory.mktemp("policy") / "model"
    save(random_model(vocab_size=len(Tokenizer.from_files(files))), folder, files)
    return folder


def rows_of(arguments: list[str], file: Path) -> list[dict[str, Any]]:
    gpu.main([*arguments, *CPU, "--results", str(file)])
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_rollout_row(policy: Path, tmp_path: Path) -> None:
    size = ["--group", "3", "--tokens", "5"]
    (row,) = rows_of(["rollout", "--model", str(policy), *size], tmp_path / "rows.jsonl")
    assert (row["prompts"], row["group"], row["tokens"]) == (2, 3, 5)
    assert len(row["seconds"]) == 2
    assert row["tokens_per_second"] == pytest.approx(2 * 3 * 5 / min(row["seconds"]))
    # One token a character, and the line's end that the template adds.
    lengths = [len(apples.row(i)["prompt"][0]["content"]) + 1 for i in range(2)]
    assert row["prompt_tokens"] == sum(lengths) / 2


def test_step_row(policy: Path, tmp_path: Path) -> None:
    size = ["--group", "2", "--tokens", "4", "--warmup", "1", "--steps", "2"]
    (row,) = rows_of(["step", "--model", str(policy), *size], tmp_path / "rows.jsonl")
    assert len(row["first_seconds"]) == 1
    assert row["step_seconds"] == pytest.approx(sum(row["seconds"]) / 2)
    assert 0 < row["metrics"]["time/rollout"] < row["step_seconds"]
    assert row["mismatch"]["mean"] <= row["mismatch"]["p99"] <= row["mismatch"]["max"] < 1e-5
    assert row["mismatch"]["max"] >= row["metrics"]["mismatch/abs_mean"] > 0
    last = row["last_step"]
    assert 4 <= last["completion_tokens"] <= 2 * 2 * 4
    assert last["update_seconds"] > 0
    # Nobody knows what a CPU can do.
    assert last["update_roofline_seconds"] is last["update_model_flop_utilisation"] is None


def test_supervised_rows(policy: Path, tmp_path: Path) -> None:
    learned, rows = tmp_path / "learned.jsonl", tmp_path / "rows.jsonl"
    learned.write_text('{"prompt": "abc", "solution": "defg"}\n' * 4)
    given = ["--model", str(policy), "--train", str(learned), "--results", str(rows)]
    given += ["--warmup", "1", "--steps", "2", "--device", "cpu", "--dtype", "float32"]
    given += ["--set", "data.template=plain"]
    gpu_sft.main([*given, "--case", "2:64", "--case", "4:16:r"])
    few, many = (json.loads(line) for line in rows.read_text().splitlines())
    # Prompt, answer, end token.
    row = 3 + 4 + 1
    assert (few["tokens_a_step"], many["tokens_a_step"]) == (2 * row, 4 * row)
    assert len(few["first_seconds"]) == 1 and len(few["seconds"]) == 2
    assert few["tokens_per_second"] == pytest.approx(2 * few["tokens_a_step"] / sum(few["seconds"]))
    assert (few["micro_tokens_used"], many["micro_tokens_used"], many["recompute"]) == (
        64,
        16,
        True,
    )


def test_a_step_row_on_a_known_device_has_the_share_that_training_prints(
    policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (gpu, speed):
        monkeypatch.setattr(module, "device_of", lambda device: Device("toy", 1e15, 1e15))
    size = ["--group", "2", "--tokens", "4", "--warmup", "0", "--steps", "1"]
    (row,) = rows_of(["step", "--model", str(policy), *size], tmp_path / "rows.jsonl")
    last = row["last_step"]
    share = last["update_model_flop_utilisation"]
    assert share == row["metrics"]["time/update_flops_share"] > 0
    # What is left of the floor is the optimizer's.
    assert last["update_roofline_seconds"] > share * last["update_seconds"]
    assert 0 < last["rollout_roofline_seconds"] < last["rollout_seconds"]


def test_train_row(policy: Path, tmp_path: Path) -> None:
    data = tmp_path / "gsm8k.jsonl"
    lines = [{"prompt": f"{i} + 1?", "answer": str(i + 1)} for i in range(8)]
    data.write_text("\n".join(map(json.dumps, lines)))
    files = ["--model", str(policy), "--train", str(data), "--test", str(data)]
    size = ["--group", "2", "--tokens", "4", "--seconds", "0.3", "--eval-every", "2"]
    (row,) = rows_of(["train", *files, *size], tmp_path / "rows.jsonl")
    steps = len(row["seconds"])
    assert [point["step"] for point in row["curve"][:-1]] == list(range(0, steps, 2))
    assert row["curve"][-1]["step"] == steps == len(row["reward"])
    last, evaluations = row["after"], [point["eval_seconds"] for point in row["curve"][1:]]
    assert last["seconds"] == pytest.approx(sum(row["seconds"]), abs=0.01) and last["seconds"] > 0.3
    assert last["seconds"] - row["seconds"][-1] <= 0.3
    assert last["with_evals"] - last["seconds"] == pytest.approx(sum(evaluations))
    assert last["tasks"] == 8 and last["strict"] <= last["lenient"]
    assert row["seconds_to_goal"] is None


def test_shape_rows(tmp_path: Path) -> None:
    sizes = ["--group", "2,4", "--tokens", "3,6", "--prompt-tokens", "11"]
    rows = rows_of(["shape", "--shape", "tiny", *sizes], tmp_path / "rows.jsonl")
    cases = [(row["group"], row["tokens"], row["phase"]) for row in rows]
    assert cases == [
        (group, tokens, phase)
        for group, tokens in [(2, 3), (2, 6), (4, 3), (4, 6)]
        for phase in ("rollout", "update")
    ]
    for row in rows:
        written = 2 * row["group"] * row["tokens"]
        assert len(row["seconds"]) == 2
        assert row["tokens_per_second"] == pytest.approx(written / min(row["seconds"]))
    assert {row["prompt_tokens"] for row in rows[::2]} == {11}


def test_rollouts_alone_make_no_optimizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shapes, "PolicyLearner", None)
    size = ["--group", "2", "--tokens", "3", "--phases", "rollout"]
    (row,) = rows_of(["shape", "--shape", "tiny", *size], tmp_path / "rows.jsonl")
    assert row["phase"] == "rollout" and row["tokens_per_second"] > 0


def test_a_case_that_fails_leaves_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A learner without room: rows before and after it are there, gradients are not."""
    learn = shapes.PolicyLearner.learn

    def full(self: Any, *given: Any) -> Any:
        learn(self, *given)
        raise torch.OutOfMemoryError("no room for 3 GiB\nat all")

    made: list[Loaded] = []
    policy = shapes.policy
    monkeypatch.setattr(shapes, "policy", lambda *given: made.append(policy(*given)) or made[0])
    monkeypatch.setattr(shapes.PolicyLearner, "learn", full)
    size = ["--group", "2,3", "--tokens", "3"]
    rows = rows_of(["shape", "--shape", "tiny", *size], tmp_path / "rows.jsonl")
    assert [row.get("left_out") for row in rows] == [None, "no room for 3 GiB"] * 2
    assert all(parameter.grad is None for parameter in made[0].model.parameters())


def test_a_case_that_would_take_too_long_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = 0.0
    monkeypatch.setattr(shapes.time, "perf_counter", lambda: clock)

    def took(seconds: float) -> dict[str, Any]:
        nonlocal clock
        clock += seconds
        return {"seconds": seconds}

    budget = shapes.Budget(100.0, "cpu")
    assert budget.row("rollout", 10, lambda: took(20.0)) == {"seconds": 20.0}
    # Four times the tokens are expected to take 80 s, which just fits; another phase is unknown.
    assert budget.row("rollout", 41, lambda: took(1.0)) == {
        "left_out": "82 s more after 20 of 100 s"
    }
    assert budget.row("update", 41, lambda: took(1.0)) == {"seconds": 1.0}
    assert "left_out" in budget.row("rollout", 40, lambda: took(1.0))
    assert budget.row("rollout", 39, lambda: took(90.0)) == {"seconds": 90.0}
    assert "left_out" in budget.row("update", 1, lambda: took(1.0))  # it is over


def test_random_weights_never_touch_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """7B on a device without memory: whatever was made elsewhere would be seen."""
    elsewhere: list[int] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(
            self, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            made = function(*args, **(kwargs or {}))
            if isinstance(made, torch.Tensor) and made.device.type != "meta":
                elsewhere.append(made.numel())
            return made

    asked: list[str] = []

    class Anywhere(torch.Generator):  # there is none for that device
        def __new__(cls, device: str) -> Anywhere:
            asked.append(device)
            return super().__new__(cls)

    monkeypatch.setattr(torch, "Generator", Anywhere)
    with Watch():
        model = shapes.policy("7B", torch.bfloat16, "meta", 0).model
    assert asked == ["meta"] and not elsewhere
    assert {(p.device.type, p.dtype) for p in model.parameters()} == {("meta", torch.bfloat16)}


def test_random_weights_follow_their_seed() -> None:
    first, again, other = (
        shapes.policy("tiny", torch.float32, "cpu", seed).model.head_weight for seed in (0, 0, 1)
    )
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert first.std().item() == pytest.approx(0.02, rel=0.05)


def test_shapes_have_the_sizes_of_their_models() -> None:
    def weights(name: str) -> int:
        with torch.device("meta"):
            model = Transformer(ModelConfig.from_hf(shapes.SHAPES[name]))
        return sum(p.numel() for p in model.parameters())

    assert weights("135M") == 134_515_008
    assert weights("1.5B") == 1_543_714_304
    assert weights("7B") == 7_615_616_512


def test_made_up_answers_differ_within_a_group() -> None:
    loaded = shapes.policy("tiny", torch.float32, "cpu", 0)
    config = load_config(group_size=4, engine={"max_tokens": 7})
    tasks = [Task(id=i, prompt="ab", token_ids=(1, 2)) for i in range(3)]
    groups = shapes.made_up(config, loaded, tasks)
    assert [[r.grade.reward for r in group] for group in groups] == [[0.0, 1.0, 0.0, 1.0]] * 3
    answers = {r.completion.token_ids for group in groups for r in group}
    assert len(answers) == 12 and {len(ids) for ids in answers} == {7}
    assert all(0 < token < 512 for ids in answers for token in ids)


def test_growth_puts_the_roofline_beside_the_measurement(tmp_path: Path) -> None:
    def row(phase: str, group: int, seconds: float, **more: Any) -> str:
        size = {"shape": "tiny", "phase": phase, "prompts": 2, "group": group, "tokens": 8}
        speed = {"seconds": [seconds, 9.0], "tokens_per_second": 2 * group * 8 / seconds}
        found = {"row": "shape", **size, **speed, "roofline_seconds": 0.5, "peak_bytes": 3e9}
        return json.dumps(found | more)

    rows = [row("rollout", 4, 7.0), row("rollout", 4, 2.0), row("update", 4, 4.0)]
    rows += [row("rollout", 16, 1.0), row("update", 16, 1.0, left_out="no room")]
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join([*rows, json.dumps({"row": "step"})]))
    found = growth.read(file)
    assert growth.table(found).splitlines()[2:] == [  # the second measurement of two counts
        "| tiny | 2 x 4 | 8 | 32 | 25 % | 4.00 | 12 % | 3.0 |",
        "| tiny | 2 x 16 | 8 | 256 | 50 % | – | – | 3.0 |",
    ]
    # 32 and 256 tokens/s; at the roofline 128 and 512. The axis goes from 10 to 1,000.
    left, right, bottom, top = 56.0, 340.0, 206.0, 30.0
    drawn = growth.panel([row for row in found if row["phase"] == "rollout"], "rollout", "group")
    for first, last in ((32, 256), (128, 512)):
        y_first, y_last = (bottom - (math.log10(y) - 1) / 2 * (bottom - top) for y in (first, last))
        assert f"{left:.1f},{y_first:.1f} {right:.1f},{y_last:.1f}" in drawn
    assert growth.plot(found).count("not measured") == 3


@pytest.mark.skipif(find_spec("vllm") is not None, reason="it is there")
def test_vllm_row_says_when_it_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import peer

    monkeypatch.setattr(peer, "ENVIRONMENT", {})  # it is set for the whole process
    (row,) = rows_of(["vllm", "--shape", "tiny"], tmp_path / "rows.jsonl")
    assert "can't be imported" in row["skipped"]


MBPP_ROW = {
    "prompt": "Write a function to double a number.",
    "answer": "def double(x): return 2 * x",
    "tests": ["assert double(2) == 4", "assert double(3) == 6"],
    "test_setup": "",
    "task_id": 7,
}
HUMANEVAL_ROW = {
    "prompt": 'def triple(x):\n    """Three times x."""\n',
    "answer": "    return 3 * x\n",
    "tests": "def check(candidate):\n    assert candidate(2) == 6\n",
    "entry_point": "triple",
    "task_id": "HumanEval/7",
}


def two_sets(folder: Path) -> Path:
    for name, row in (("mbpp", MBPP_ROW), ("humaneval", HUMANEVAL_ROW)):
        (folder / name).mkdir(parents=True)
        (folder / name / "test.jsonl").write_text(json.dumps(row))
    return folder


def test_models_are_asked_with_the_first_test_alone(tmp_path: Path) -> None:
    first, second = written.asked(two_sets(tmp_path))
    assert first["row"] == "7" and second["row"] == "HumanEval/7"
    assert "assert double(2) == 4" in first["prompt"] and "double(3)" not in first["prompt"]
    assert HUMANEVAL_ROW["prompt"] in second["prompt"] and "return" not in second["prompt"]


PROGRAMS = [  # set, program, whether it is right
    ("mbpp", "def double(x): return x + x", True),
    ("mbpp", "def double(x): return x ** 2", False),
    ("mbpp", "import sys\ndef double(x): sys.exit(0)", False),
    ("mbpp", "import os\ndef double(x): os._exit(0)", False),
    ("mbpp", "import numpy\ndef double(x): return 2 * x", False),  # there are no packages
    ("mbpp", "def double(x): return 2 * x\nif __name__ == '__main__': input()", True),
    ("humaneval", "def triple(x):\n    return x + x + x", True),
    ("humaneval", "    return x * 3", True),
    ("humaneval", "def triple(x):\n    return x", False),
]


def answers_in(file: Path) -> Path:
    rows = {"mbpp": "7", "humaneval": "HumanEval/7"}
    file.write_text(
        "".join(
            json.dumps(
                {
                    "set": name,
                    "row": rows[name],
                    "finish": "eos",
                    "ends": ["<end>"],
                    "text": f"Here:\n```python\n{program}\n```<end>",
                }
            )
            + "\n"
            for name, program, _ in PROGRAMS
        )
    )
    return file


def test_written_programs_are_judged_as_plain_python_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, file = two_sets(tmp_path / "data"), answers_in(tmp_path / "written.jsonl")
    found = written.judged(written.lines(file), data)
    assert [each.plain.right for each in found] == [right for *_, right in PROGRAMS]
    assert [each.kind for each in found] == [""] * len(PROGRAMS)
    assert written.main(["judge", str(file), "--data", str(data)]) == 0
    said = capsys.readouterr().out
    assert "mbpp: 6 programs; by plain Python 2 right, 4 wrong" in said
    assert "REFUSED although right: 0" in said and "ACCEPTED although wrong: 0" in said


@pytest.mark.parametrize(
    ("always", "kind", "code"),
    [(True, "ACCEPTED although wrong: 5", 1), (False, "REFUSED although right: 4", 0)],
)
def test_a_grader_that_is_wrong_is_found_out(
    always: bool,
    kind: str,
    code: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    class Careless:
        def __init__(self, *given: Any) -> None: ...

        def grade(self, samples: Any) -> list[Grade]:
            return [Grade(float(always), correct=always) for _ in samples]

    monkeypatch.setattr(written, "Grader", Careless)
    data, file = two_sets(tmp_path / "data"), answers_in(tmp_path / "written.jsonl")
    assert written.main(["judge", str(file), "--data", str(data)]) == code
    assert kind in capsys.readouterr().out


def test_programs_are_written_for_every_row(tmp_path: Path) -> None:
    """By a model of random weights; what it says ends with the limit or its end token."""
    data, rows, out = two_sets(tmp_path / "data"), tmp_path / "rows.jsonl", tmp_path / "out.jsonl"
    assert written.main(["rows", str(data), str(rows)]) == 0
    characters = string.printable[:-3]  # up to the line feed
    template = b"{% for message in messages %}{{ message.content }}{% endfor %}:"
    files = character_files(characters) | {"chat_template.jinja": template}
    save(random_model(vocab_size=len(characters) + 8), tmp_path / "model", files)
    size = ["--samples", "2", "--max-tokens", "5", "--device", "cpu", "--dtype", "float32"]
    model = str(tmp_path / "model")
    assert written.main(["write", model, str(out), "--rows", str(rows), *size]) == 0
    found = written.lines(out)
    assert sorted(row["row"] for row in found) == ["7", "7", "HumanEval/7", "HumanEval/7"]
    assert all(row["text"] and row["finish"] in ("length", "eos") for row in found)


@pytest.mark.slow  # it loads transformers
def test_a_mixture_beside_transformers_in_miniature(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    assert moe.main(["--tiny"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert rows[1]["mean_apart"] < 1e-5 and rows[2]["turned_share"] == 0
    assert [row["phase"] for row in rows if "times_transformers" in row] == ["rollout", "update"]
    assert rows[0]["parameters"] > rows[0]["active"] > 0


def test_the_mixture_has_the_size_that_is_said() -> None:
    shape = ModelConfig.from_hf(shapes.SHAPES["moe"])
    assert parameters(shape) == pytest.approx(0.98e9, rel=0.01)
    assert active_parameters(shape) == pytest.approx(0.28e9, rel=0.01)


def test_losses_names_what_is_above_its_bounds() -> None:
    """Twice plain GRPO's time and memory, and 2 % of a training step, are within them."""
    step, bounds = 10.0, (2.0, 2.0)
    at = losses.Row("at", 0.2, 9.0, *bounds)  # its token phase alone has no bound
    assert losses.above_bounds([at], step) == []
    slow, large, long = at._replace(time=2.01), at._replace(memory=2.5), at._replace(seconds=0.3)
    assert losses.above_bounds([slow, at, large, long], step) == [
        "at: 2.01x plain GRPO's time, above 2x",
        "at: 2.50x plain GRPO's memory, above 2x",
        "at: 3.00% of a training step, above 2%",
    ]


def test_agreement_with_pairs_of_a_file(tmp_path: Path) -> None:
    """Suspect rows are left out; math-verify as it comes is a column, and who is ahead is said."""
    pytest.importorskip("math_verify")
    bare = {"source": "bare:x.py", "kind": "equivalence"}
    rows = [
        {"gold": "1/2", "pred": "0.5", "expected": True, **bare},
        {"gold": "2", "pred": "3", "expected": True, **bare},
        {"gold": "2", "pred": "2", "expected": False, "suspect": True, **bare},
        # a sentence whose last number is a reason: math-verify takes it
        {"gold": "5", "pred": "It is 4, as 4 < 5", "expected": False, "source": "text:x.py"},
    ]
    rows[-1]["kind"] = "extraction"
    path = tmp_path / "pairs.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    found = {row["suite"]: row for row in graders.agreement(path)}
    assert list(found) == ["all", "bare", "text"]
    assert found["bare"]["pairs"] == 2 and found["bare"]["groupwise"] == 1
    assert found["bare"]["groupwise_wrong_refusals"] == 1
    assert found["bare"]["math_verify"] == 1 and found["bare"]["standing"] == "level"
    assert found["text"]["groupwise"] == 1 and found["text"]["math_verify_wrong_acceptances"] == 1
    assert found["text"]["standing"] == found["all"]["standing"] == "above"
    assert "math_verify_told" not in found["all"]
