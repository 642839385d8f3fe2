"""Bugs that other tools had, and that nobody saw, looked for in whole runs: a test each, by number.

26: log-probabilities of positions that are no tokens. 27: the head's precision. 30, 33, 34: the
same tokens for sampler, learner and reward. 42: answers of an older policy.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cold_start
import pytest
import torch
from cold_start import rows
from runs import left_behind, metrics
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend
from torch import Tensor

from groupwise.engine.native import engine as native
from groupwise.model.config import ModelConfig
from groupwise.model.formats.checkpoint import load, save
from groupwise.model.layers.head import log_probs
from groupwise.model.layers.transformer import Transformer
from groupwise.optim import assemble, learner, packs

Patch = pytest.MonkeyPatch


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return cold_start.make(tmp_path_factory.mktemp("model") / "cold")


# --- 26 -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sentinel", [1.0, -1e9, 1e4])
@pytest.mark.parametrize("recipe", ["grpo", "tis", "gspo"])
def test_bug_26_what_stands_where_no_token_is_reaches_no_sum(
    recipe: str, sentinel: float, model: str, tmp_path: Path, monkeypatch: Patch
) -> None:
    """Padded positions of every stream hold a sentinel: the run is the same to the last bit.

    Sampler, scoring and update hold different ones: the same in two would cancel in a ratio.
    """

    def run(name: str) -> dict[str, Any]:
        cold_start.run_from(model, tmp_path / name, recipe=recipe, steps=2)
        return left_behind(tmp_path / name)

    clean = run("clean")
    polluted = 0

    def pollute(x_NT: Tensor, mask_NT: Tensor, junk: float) -> Tensor:
        nonlocal polluted
        polluted += int((~mask_NT).sum())
        keep = mask_NT if x_NT.dim() == 2 else mask_NT[..., None]
        return torch.where(keep, x_NT, torch.tensor(junk).to(x_NT))

    spread, padded = packs.Pack.spread, assemble._padded

    def spread_and_polluted(self: packs.Pack, x_A: Tensor) -> Tensor:
        junk = (3 if torch.is_grad_enabled() else 2) * sentinel
        return pollute(spread(self, x_A), self.mask_NT, junk)

    def padded_and_polluted(values: Any, mask_NT: Tensor) -> Tensor:
        return pollute(padded(values, mask_NT), mask_NT, sentinel)

    monkeypatch.setattr(packs.Pack, "spread", spread_and_polluted)
    monkeypatch.setattr(assemble, "_padded", padded_and_polluted)
    assert run("polluted") == clean
    assert polluted > 100


# --- 27 -------------------------------------------------------------------------------------------


def test_bug_27_the_head_is_in_float32_whatever_the_chunk() -> None:
    """A bfloat16 model: every chunk gives the exact log-probabilities, within float32 rounding."""
    generator = torch.Generator().manual_seed(0)
    tokens, width, vocabulary = 24, 64, 1000
    hidden_TD = torch.randn(tokens, width, generator=generator).bfloat16()
    weight_VD = (0.5 * torch.randn(vocabulary, width, generator=generator)).bfloat16()
    token_T = torch.randint(vocabulary, (tokens,), generator=generator)
    exact_T = (hidden_TD.double() @ weight_VD.double().t()).log_softmax(-1)
    exact_T = exact_T[torch.arange(tokens), token_T]
    found = [
        log_probs(hidden_TD, weight_VD, token_T, chunk=chunk).logp_T
        for chunk in range(1, tokens + 1)
    ]
    for logp_T in found:
        assert logp_T.dtype == torch.float32
        torch.testing.assert_close(logp_T.double(), exact_T, rtol=0, atol=2e-5)
    # A head in bfloat16 would be off by a thousand times as much.
    coarse_T = (hidden_TD @ weight_VD.t()).log_softmax(-1)[torch.arange(tokens), token_T]
    assert float((coarse_T.double() - exact_T).abs().max()) > 1e-2


def test_bug_27_the_gradient_of_the_head_does_not_depend_on_the_chunk() -> None:
    generator = torch.Generator().manual_seed(1)
    hidden_TD = torch.randn(12, 32, generator=generator).bfloat16()
    start_VD = torch.randn(300, 32, generator=generator).bfloat16()
    token_T = torch.randint(300, (12,), generator=generator)

    def gradient(chunk: int, dtype: torch.dtype) -> Tensor:
        weight_VD = start_VD.to(dtype, copy=True).requires_grad_()
        log_probs(hidden_TD.to(dtype), weight_VD, token_T, chunk=chunk).logp_T.sum().backward()
        assert weight_VD.grad is not None
        return weight_VD.grad

    whole = gradient(12, torch.float64)
    for chunk in range(1, 13):  # summed in float32, rounded once at the end
        torch.testing.assert_close(
            gradient(chunk, torch.bfloat16).double(), whole, rtol=2**-8, atol=1e-5
        )


def test_bug_27_a_bfloat16_run_samples_what_it_learns(model: str, tmp_path: Path) -> None:
    """Only the hidden states are rounded: far below what a rounded head would do."""
    cold_start.run_from(
        model, tmp_path / "run", model__dtype="bfloat16", steps=2, guard__mismatch=0.01
    )
    for line in metrics(tmp_path / "run")[1:]:
        assert line["mismatch/abs_mean"] < 0.01


# --- 30, 33, 34 -----------------------------------------------------------------------------------


@pytest.fixture
def ambiguous(model: str, tmp_path: Path) -> str:
    """A model whose tokenizer has `1`, `2` and `12`: texts do not say which tokens they are."""
    vocabulary = {token: i for i, token in enumerate(["<end>", *"0123456789+=", "12", "11", "10"])}
    backend = Backend(models.WordLevel(vocabulary, unk_token="\0"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"12|11|10|[\s\S]"), behavior="isolated")
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([AddedToken("<end>", special=True, normalized=False)])
    shape = json.loads((Path(model) / "config.json").read_text())
    shape |= {"vocab_size": len(vocabulary), "max_position_embeddings": 32}
    made = Transformer(ModelConfig.from_hf(shape)).initialise(torch.Generator().manual_seed(3))
    files = load(model).files | {"tokenizer.json": backend.to_str().encode()}
    save(made, tmp_path / "ambiguous", files)
    return str(tmp_path / "ambiguous")


@pytest.fixture
def seen(monkeypatch: Patch) -> dict[str, list[Any]]:
    """Prompts and completions by the sampler, and those of every pass of the learner."""
    found: dict[str, list[Any]] = {"sampled": [], "scored": [], "learned": []}
    generate = native.NativeEngine.generate

    def noted(self: Any, requests: Any, sampling: Any, **told: Any) -> Any:
        groups = generate(self, requests, sampling, **told)
        if requests[0].stream == "train":
            found["sampled"] += [
                (r.prompt, c.token_ids) for r, group in zip(requests, groups, strict=True)
                for c in group
            ]  # fmt: skip
        return groups

    def passing(kind: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def outputs(policy: Any, part: packs.Pack, **options: Any) -> Any:
            # What the model reads and predicts, not only what it was handed.
            lengths = part.mask_NT.sum(1).tolist()
            both = zip(part.take_A.split(lengths), part.target_A.split(lengths), strict=True)
            for take_T, target_T in both:
                end = int(take_T[0])  # the state of the prompt's last token predicts the first
                prompt_T = part.token_T[end - int(part.position_T[end]) : end + 1]
                assert torch.equal(part.token_T[take_T[1:]], target_T[:-1])
                found[kind].append((tuple(prompt_T.tolist()), tuple(target_T.tolist())))
            return real(policy, part, **options)

        return outputs

    monkeypatch.setattr(native.NativeEngine, "generate", noted)
    monkeypatch.setattr(packs, "outputs", passing("scored", packs.outputs))
    monkeypatch.setattr(learner, "outputs", passing("learned", learner.outputs))
    return found


REWARD = """
import json
from pathlib import Path

def f(prompt, completion, completion_ids, finish, answer):
    with open(Path(__file__).with_name("seen.jsonl"), "a") as file:
        file.write(json.dumps([prompt, completion, completion_ids, finish]) + "\\n")
    return float(completion.startswith("1"))
"""


def test_bug_30_33_34_one_set_of_tokens_for_sampler_learner_reward_and_files(
    ambiguous: str, seen: dict[str, list[Any]], tmp_path: Path
) -> None:
    (tmp_path / "reward.py").write_text(REWARD)
    folder = tmp_path / "run"
    cold_start.run_from(
        ambiguous,
        folder,
        recipe="grpo",
        steps=2,
        eval__tasks=0,
        data__options={"digits": 2},
        **{"reward.parts": {f"{tmp_path}/reward.py:f": 1.0}},
    )
    tokenizer = load(ambiguous).tokenizer
    recorded = [row for step in (1, 2) for row in rows(folder, step)]
    ids = [(tuple(r["prompt_token_ids"]), tuple(r["token_ids"])) for r in recorded]
    # 30: the ids that were sampled are those in the files and those that are learned from; no
    # round trip through text lies between, which would have changed some of them.
    assert ids == seen["sampled"] == seen["learned"]
    drifted = [x for _, x in ids if tuple(tokenizer.encode(tokenizer.decode(x))) != x]
    assert drifted
    # 33: so are the prompts, whole: what the data says, tokenised once; the reference's too.
    assert {prompt for prompt, _ in seen["scored"]} >= {prompt for prompt, _ in ids}
    for row in recorded:
        assert row["prompt_text"] == tokenizer.decode(row["prompt_token_ids"])
        assert row["prompt_text"].endswith("=")
    # 34: the reward gets the text without the token that ended it, and all of the ids.
    told = [json.loads(line) for line in (tmp_path / "seen.jsonl").read_text().splitlines()]
    told = told[-len(recorded) :]  # behind the trials before the run
    for row, (prompt, text, token_ids, finish) in zip(recorded, told, strict=True):
        end = "<end>" if finish == "eos" else ""
        assert (row["prompt_text"], row["token_ids"], row["finish"]) == (prompt, token_ids, finish)
        assert row["text"] == text + end
        assert (finish == "eos") == (token_ids[-1] == 0)
    assert {finish for *_, finish in told} == {"eos", "length"}


def test_bug_33_a_limit_on_prompts_drops_rows_and_cuts_none(
    model: str, seen: dict[str, list[Any]], tmp_path: Path
) -> None:
    rows_ = [{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in (1, 2, 3, 44444)]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows_))
    cold_start.run_from(
        model, tmp_path / "run", steps=1, data__train=str(path), data__max_prompt_tokens=5
    )
    prompts = {row["prompt_text"] for row in rows(tmp_path / "run", 1)}
    assert prompts == {"1+1=", "2+1=", "3+1="}
    assert {p for p, _ in seen["sampled"]} == {p for p, _ in seen["learned"]}
    assert all(len(prompt) == 4 for prompt, _ in seen["learned"])


# --- 42 -------------------------------------------------------------------------------------------


def test_bug_42_answers_of_an_older_policy_are_all_learned_from_the_long_ones_too(
    model: str, seen: dict[str, list[Any]], tmp_path: Path
) -> None:
    """Leaving stale answers out would leave out long ones, which take longer to be written."""
    cold_start.run_from(
        model, tmp_path / "run", recipe="tis", steps=4, eval__tasks=0, engine__weights="stale:2"
    )
    assert max(step["staleness/max"] for step in metrics(tmp_path / "run")[1:]) == 2
    assert sorted(seen["learned"]) == sorted(seen["sampled"])
    assert len({len(answer) for _, answer in seen["sampled"]}) > 1
    assert all(row["used"] for step in (1, 2, 3, 4) for row in rows(tmp_path / "run", step))
