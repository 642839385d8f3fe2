"""Answers of the data: the recipe `sft`, its numbers by the textbook, and what is refused."""

from __future__ import annotations

import io
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import quiet, small
from steps import BARE, Start, advance, full_logp, gather, gradient, learn, plain_logp

from groupwise import recipe
from groupwise.config import Config, load
from groupwise.config.reading import DEFAULTS
from groupwise.data.on_disk import DiskTasks
from groupwise.errors import ConfigError, DataError, RecipeError, RunError
from groupwise.model.formats.tokenizer import Tokenizer
from groupwise.model.layers.transformer import Transformer
from groupwise.optim.assemble import sequences_of
from groupwise.optim.packs import Sequences
from groupwise.probing.probe import ProbeRequest, prepare_probe
from groupwise.runfiles.rollouts import read
from groupwise.stages import stage_of
from groupwise.stages.checks import check_config, refusals
from groupwise.stages.data_answers import DataAnswers
from groupwise.stages.ignored import Ignored
from groupwise.stages.sources import SOURCES
from groupwise.training.loop import steps, train
from groupwise.training.opening import open_run
from groupwise.watch.display import Display

SFT = {"recipe": "sft", "group_size": 8}  # the default: nothing is sampled


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Start:
    return Start(tmp_path_factory.mktemp("start"))


def metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def slope_of(model: Transformer, loss: torch.Tensor) -> torch.Tensor:
    found = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    return torch.cat([x.double().flatten() for x in found if x is not None])


def weighted(start: Start) -> str:
    rows = [
        {"prompt": f"{a}+1=", "completion": f"{a},1;{a + 1}", "weight": 0.5 * (a % 3)}
        for a in range(8)
    ]
    return start.rows("weighted", rows)


@pytest.mark.parametrize("micro_tokens", [1, 24, 4096])
@pytest.mark.parametrize("rows", ["solutions", "weights"])
def test_the_update_is_that_of_the_textbook(
    rows: str, micro_tokens: int, start: Start, tmp_path: Path
) -> None:
    """−Σ w·log p / number of tokens, over the whole update, end tokens included."""
    data = {} if rows == "solutions" else {"data__train": weighted(start)}
    with start.opened(tmp_path, **SFT, **BARE, **data, optim__micro_tokens=micro_tokens) as run:
        model, tokenizer = run.parts.loaded.model, run.parts.loaded.tokenizer
        collected = gather(run)
        sequences = sequences_of(collected.groups)
        for group in collected.groups:
            (row,) = group
            wanted = row.task.columns.get("completion", row.task.columns.get("solution"))
            assert row.completion.token_ids == (*tokenizer.encode(wanted), tokenizer.eos_ids[0])
        weight_N = torch.tensor([g[0].task.columns.get("weight", 1.0) for g in collected.groups])
        twin = Transformer(model.config)
        twin.load_state_dict(model.state_dict())
        loss = -(weight_N[:, None] * with_gradient(twin, sequences)).sum() / sequences.mask().sum()
        found = learn(run, collected, rate=0.0)
        assert found.metrics["loss/total"] == pytest.approx(float(loss.detach()), rel=1e-5)
        # With beta1 = 0 the first moment is the gradient.
        expected = slope_of(twin, loss)
        assert float((gradient(run) - expected).norm() / expected.norm()) < 1e-5


def with_gradient(model: Transformer, sequences: Any) -> torch.Tensor:
    """logp_NT row by row, from logits of plain forward passes."""
    from groupwise.model.layers.attention import packed, packed_positions
    from groupwise.model.layers.head import logits

    rows = []
    for prompt, answer in zip(sequences.prompts, sequences.completions, strict=True):
        ids = torch.tensor([*prompt, *answer])
        hidden = model(ids, packed_positions([len(ids)]), packed([len(ids)]))
        every = torch.log_softmax(logits(hidden, model.head_weight), -1)[len(prompt) - 1 : -1]
        own = every.gather(1, torch.tensor(answer)[:, None])[:, 0]
        rows.append(torch.nn.functional.pad(own, (0, sequences.width - len(answer))))
    return torch.stack(rows)


def test_the_data_become_likelier_and_nothing_is_sampled(start: Start, tmp_path: Path) -> None:
    with start.opened(tmp_path, **SFT, prompts_per_step=16) as run:
        rows = sequences_of([group for _ in range(5) for group in gather(run).groups])  # all
        before = plain_logp(run.parts.loaded.model, rows).sum(1).mean()
        advance(run, 12)
        after = plain_logp(run.parts.loaded.model, rows).sum(1).mean()
        assert float(after) > float(before) + 0.1
        assert run.progress.tokens == 0 and run.progress.step == 12
        run.reporter.recorder.flush()
    lines = metrics(tmp_path)
    assert lines[-1]["loss/total"] < lines[0]["loss/total"]
    assert not any(
        name.startswith(("mismatch/abs", "staleness", "reward/sampled")) for name in lines[-1]
    )
    table = read(tmp_path / "rollouts" / "step_1.parquet")
    assert len(table) == 16 and set(table["weights"].to_pylist()) == {"data"}
    assert all(text.endswith("<end>") for text in table["text"].to_pylist())


def test_a_supervised_run_that_is_cut_short_goes_on_to_the_same_bits(
    start: Start, tmp_path: Path
) -> None:
    changes = start.settings(**SFT, steps=4, checkpoint__every_steps=1)
    train(small(**changes), tmp_path / "whole", quiet())
    train(small(**changes | {"steps": 2}), tmp_path / "cut", quiet())
    train(small(**changes), tmp_path / "cut", quiet())
    kept = [
        {k: x for k, x in line.items() if not k.startswith(("time/", "memory/", "cost/"))}
        for folder in ("whole", "cut")
        for line in metrics(tmp_path / folder)
        if line["step"] == 4
    ]
    assert kept[0]["weights/fingerprint"] == kept[1]["weights/fingerprint"]


def test_every_epoch_reads_every_row_once(start: Start, tmp_path: Path) -> None:
    with start.opened(tmp_path, **SFT, prompts_per_step=20) as run:
        seen = [r.task.id for _ in range(4) for group in gather(run).groups for r in group]
    assert sorted(seen) == list(range(80))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"completion": ""}, "no text in column 'completion' or 'solution'"),
        ({}, "no text in column 'completion' or 'solution'"),
        ({"completion": "1", "weight": -1}, "has weight -1"),
        ({"completion": "1", "weight": "much"}, "has weight 'much'"),
        ({"completion": "1", "weight": True}, "has weight True"),
    ],
)
def test_rows_that_nothing_can_be_learned_from_are_refused(
    row: dict[str, Any], message: str, start: Start, tmp_path: Path
) -> None:
    good = {"prompt": "1+1=", "completion": "2"}
    data = start.rows("bad", [good, {"prompt": "1+2="} | row])
    with (
        pytest.raises(DataError, match=message),
        start.opened(tmp_path, **SFT, data__train=data),
    ):
        pass


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"recipe.ratio": "token(anchor='sampler')", "recipe.gate": "clip()"}, "have none"),
        ({"recipe.filter": "zero_variance()"}, "the same answer every time"),
        ({"recipe.advantage": "group_zscore()"}, "there are none"),
        ({"group_size": 4}, "group_size=4 would be ignored by sft"),
        ({"engine.temperature": 0.7}, "engine.temperature=0.7 would be ignored"),
        ({"engine.weights": "int8"}, "engine.weights=int8 would be ignored"),
        ({"budget.tokens": 100}, "samples nothing"),
        ({"epochs": 2, "steps": 30}, "both say how long"),
        ({"epochs": 2, "data.train": {"arithmetic": 0.5, "chain": 0.5}}, "mixture by weights"),
    ],
)
def test_what_only_samples_have_is_refused(changes: dict[str, Any], message: str) -> None:
    plain = {"recipe": "sft", "data.train": "arithmetic", "model.path": "tiny"}
    check_config(load(plain))
    with pytest.raises(ConfigError, match=message):
        check_config(load(plain | changes))


def test_epochs_end_the_run_and_its_schedule_exactly(start: Start, tmp_path: Path) -> None:
    """8 rows, 3 a step: one and a half passes are 4 steps, also of a run that was stopped."""
    asked = {"data__train": weighted(start), "prompts_per_step": 3, "epochs": 1.5, "eval__tasks": 0}
    config = small(
        **start.settings(**SFT, **asked, optim__schedule="linear", optim__learning_rate=0.4)
    )
    config = replace(config, steps=DEFAULTS["steps"])
    whole = train(config, tmp_path / "whole", quiet())
    assert whole["steps"] == 4
    rates = [line["optim/learning_rate"] for line in metrics(tmp_path / "whole") if line["step"]]
    assert rates == pytest.approx([0.4, 0.3, 0.2, 0.1])

    cycle = steps(config, tmp_path / "stopped", quiet())
    for _ in range(3):  # step 0, and two of the four
        next(cycle)
    cycle.close()
    assert train(config, tmp_path / "stopped", quiet())["steps"] == 4
    last = "checkpoints/latest/model.safetensors"
    assert (tmp_path / "stopped" / last).read_bytes() == (tmp_path / "whole" / last).read_bytes()

    again = io.StringIO()
    assert train(config, tmp_path / "whole", Display(again))["steps"] == 4
    assert "is finished after 4 steps" in again.getvalue()
    with pytest.raises(RunError, match=r"epochs.*another folder"):
        train(replace(config, epochs=2.0), tmp_path / "whole", quiet())


def test_a_refusal_of_a_setting_without_effect_knows_the_setting() -> None:
    """A pipeline leaves such defaults out by their names; words in a value say nothing."""
    asked = {"recipe": "sft", "data.train": "x would be ignored by y.jsonl", "model.path": "tiny"}
    found = refusals(
        load(asked | {"group_size": 4, "engine.temperature": 0.7, "epochs": 1, "steps": 2})
    )
    names = [each.setting for each in found if isinstance(each, Ignored)]
    assert names == ["group_size", "engine.temperature"] and len(found) == 3


def test_epochs_are_of_rows_that_are_learned() -> None:
    with pytest.raises(ConfigError, match="epochs=2 counts rows that are learned, and grpo"):
        check_config(load({"recipe": "grpo", "model.path": "tiny", "epochs": 2}))


def test_a_source_is_a_setting_and_comes_back_from_its_text() -> None:
    own = recipe("grpo").replace(name="mine", source="data")
    assert own.text()["source"] == "data" and "source" not in recipe("grpo").text()
    again = type(own).from_text("mine", own.text())
    assert again == own and not again.samples and again.columns == ("completion",)
    assert recipe("reinforce", {"source": "data"}).source == "data"
    wrong = small(recipe="sft", recipe__source="dta", group_size=8)
    with pytest.raises(RecipeError, match="Did you mean 'data'"):
        stage_of(wrong)


@pytest.mark.parametrize(
    ("row", "message"),
    [({}, "no text in column 'completion'"), ({"completion": "1", "weight": "x"}, "has weight")],
)
def test_such_rows_are_refused_before_a_model_is_loaded(
    row: dict[str, Any], message: str, start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*given: Any) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr("groupwise.training.opening.starting_model", never)
    data = start.rows("early", [{"prompt": "1+2="} | row])
    with pytest.raises(DataError, match=message), start.opened(tmp_path, **SFT, data__train=data):
        pass


def test_a_source_gets_what_stands_behind_the_colon(monkeypatch: pytest.MonkeyPatch) -> None:
    class Elsewhere(DataAnswers):
        def __init__(self, config: Config, place: str) -> None:
            super().__init__(config, "")
            self.place = place

    monkeypatch.setitem(SOURCES, "elsewhere", Elsewhere)
    found = stage_of(small(recipe="sft", recipe__source="elsewhere:a:b", group_size=8))
    assert found.source.place == "a:b"
    assert found.recipe.columns == () and not found.recipe.samples  # of the data it reads nothing
    for name in ("data", "policy"):
        with pytest.raises(RecipeError, match=f"Write recipe.source={name}"):
            stage_of(small(recipe="sft", recipe__source=f"{name}:x", group_size=8))


def test_rows_that_all_count_nothing_are_refused(start: Start, tmp_path: Path) -> None:
    rows = [{"prompt": f"{a}+1=", "completion": f"{a + 1}", "weight": 0} for a in range(4)]
    with (
        pytest.raises(DataError, match="`weight` is 0 in every row"),
        start.opened(tmp_path, **SFT, data__train=start.rows("nothing", rows)),
    ):
        pass


def test_a_baseline_of_a_group_is_not_told_to_raise_what_would_be_ignored() -> None:
    made = recipe("grpo").replace(source="data")
    with pytest.raises(ConfigError, match=r"source data\) has one answer") as why:
        check_config(replace(small(group_size=8), recipe=made))
    assert "Raise group_size" not in str(why.value)


def test_probe_says_what_the_recipe_learns_from() -> None:
    with pytest.raises(ConfigError, match="sft learns from answers of the data and samples none"):
        prepare_probe(small(**SFT), ProbeRequest())


# --- conversations ----------------------------------------------------------------------------

# '3+4' asked, '=' opens the answer, which ends with the model's own end token.
TALKS = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{{ m.content }}<end>"
    "{% else %}{{ m.content }}={% endif %}{% endfor %}"
)


@pytest.fixture(scope="module")
def chat(start: Start, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The model with a chat template."""
    folder = tmp_path_factory.mktemp("chat") / "model"
    shutil.copytree(start.model, folder)
    (folder / "chat_template.jinja").write_text(TALKS)
    return str(folder)


def talk(*said: str, **columns: Any) -> dict[str, Any]:
    roles = ("user", "assistant") * len(said)
    messages = [{"role": r, "content": x} for r, x in zip(roles, said, strict=False)]
    return {"messages": messages, **columns}


def conversations(start: Start) -> str:
    rows = [
        talk(f"{a}+1", f"{a + 1}", f"{a}+2", f"{a},2;{a + 2}", weight=0.5 + a % 3) for a in range(8)
    ]
    return start.rows("talks", rows)


@pytest.mark.parametrize("micro_tokens", [1, 40, 4096])
def test_of_conversations_the_answers_alone_are_learned_packed_or_not(
    micro_tokens: int, start: Start, chat: str, tmp_path: Path
) -> None:
    changes = {"data__train": conversations(start), "model__path": chat, "prompts_per_step": 8}
    with start.opened(tmp_path, **SFT, **BARE, **changes, optim__micro_tokens=micro_tokens) as run:
        model, tokenizer = run.parts.loaded.model, run.parts.loaded.tokenizer
        collected = gather(run)
        twin = Transformer(model.config)
        twin.load_state_dict(model.state_dict())
        loss, tokens = torch.zeros(()), 0
        for (row,) in collected.groups:
            first, second = (row.task.columns["messages"][n]["content"] for n in (1, 3))
            own = row.completion.own_ids
            end = tokenizer.eos_ids[0]
            assert own == (*tokenizer.encode(first), end, *tokenizer.encode(second), end)
            # By the textbook: the whole text in one pass, and of it the answers' tokens.
            ids = torch.tensor([*row.task.token_ids, *row.completion.token_ids])
            every = textbook(twin, ids)
            mask_T = row.completion.mask_T
            assert mask_T is not None and not mask_T.all()
            learned = mask_T.nonzero()[:, 0] + len(row.task.token_ids)
            picked = every[learned - 1].gather(1, ids[learned][:, None])
            loss = loss - row.task.columns["weight"] * picked.sum()
            tokens += len(learned)
        loss = loss / tokens
        found = learn(run, collected, rate=0.0)
        assert found.metrics["loss/total"] == pytest.approx(float(loss.detach()), rel=1e-5)
        expected = slope_of(twin, loss)
        assert float((gradient(run) - expected).norm() / expected.norm()) < 1e-5
        read = sum(len(r.task.token_ids) + len(r.completion.token_ids) for (r,) in collected.groups)
        assert found.metrics["supervised/learned_share"] == pytest.approx(tokens / read)


def textbook(model: Transformer, ids: torch.Tensor) -> torch.Tensor:
    from groupwise.model.layers.attention import packed, packed_positions
    from groupwise.model.layers.head import logits

    hidden = model(ids, packed_positions([len(ids)]), packed([len(ids)]))
    return torch.log_softmax(logits(hidden, model.head_weight), -1)


def test_packs_predict_what_is_learned_and_nothing_else(
    start: Start, chat: str, tmp_path: Path
) -> None:
    """So no target of a hole can change a loss: none is ever asked for."""
    changes = {"data__train": conversations(start), "model__path": chat}
    with start.opened(tmp_path, **SFT, **changes) as run:
        collected = gather(run)
        sequences = sequences_of(collected.groups)
        pack = sequences.pack(list(range(len(collected.groups))))
        own = [token for (row,) in collected.groups for token in row.completion.own_ids]
        assert pack.target_A.tolist() == own


def test_rows_are_encoded_once(
    start: Start, chat: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for streaming in ("never", "always"):
        changes = {"data__train": conversations(start), "model__path": chat}
        folder = tmp_path / streaming
        with start.opened(folder, **SFT, **changes, data__streaming=streaming) as run:
            with monkeypatch.context() as patched:
                patched.setattr(Tokenizer, "encode", None)
                rows = [row for _ in range(3) for (row,) in gather(run).groups]
            assert isinstance(run.parts.tasks, DiskTasks) == (streaming == "always")
            assert all(row.completion.mask_T is not None for row in rows)


def test_too_long_rows_are_dropped_counted_and_never_cut(start: Start, tmp_path: Path) -> None:
    rows = [{"prompt": "1+1=", "completion": "2"}, {"prompt": "1+2=", "completion": "1" * 500}]
    data = start.rows("long", [*rows, {"prompt": "1+3=", "completion": "1,3;4"}])
    said = io.StringIO()
    config = small(**start.settings(**SFT, data__train=data))
    with open_run(config, tmp_path, Display(said, live=False)) as run:
        assert [task.id for task in run.parts.tasks] == [0, 2]
    assert "1 of 3 rows are longer than" in said.getvalue()
    assert json.loads((tmp_path / "manifest.json").read_text())["dropped_rows"] == {"too long": 1}
    config = small(**start.settings(**SFT, data__train=data, data__max_row_tokens=7))
    with open_run(config, tmp_path / "b", quiet()) as run:
        assert [task.id for task in run.parts.tasks] == [0]  # 4 + 1 + the end
    config = small(**start.settings(**SFT, data__train=data, data__max_row_tokens=3))
    with (
        pytest.raises(DataError, match=r"All 3 rows are longer than 3 tokens.*the shortest has 6"),
        open_run(config, tmp_path / "c", quiet()),
    ):
        pass


def test_bad_rows_are_dropped_and_counted_where_that_is_asked_for(
    start: Start, chat: str, tmp_path: Path
) -> None:
    bad = [talk("1+1"), talk("1+1", " "), talk("1+1", "2", weight=-1)]
    data = start.rows("some", [talk("1+1", "2"), *bad, talk("1+2", "3")])
    changes = start.settings(**SFT, data__train=data, model__path=chat)
    with (
        pytest.raises(DataError, match=r"(?s)3 of 5 rows can't be learned.*Row 1.*data.drop_bad"),
        open_run(small(**changes), tmp_path / "refused", quiet()),
    ):
        pass
    said = io.StringIO()
    with open_run(
        small(**changes, data__drop_bad=True), tmp_path / "dropped", Display(said, live=False)
    ) as run:
        assert [task.id for task in run.parts.tasks] == [0, 4]
    assert "3 of 5 rows can't be learned and were left out" in said.getvalue()
    kept = json.loads((tmp_path / "dropped" / "manifest.json").read_text())
    assert kept["dropped_rows"] == {"data.train": 3}


def test_bad_and_long_held_out_rows_are_counted(start: Start, chat: str, tmp_path: Path) -> None:
    """A template may have no way to write a row: refused by number, or left out and counted."""
    bad = {"messages": [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": " "}]}
    held = start.rows("doubtful", [talk("1+1", "2"), bad, talk("1+2", "3" * 30)])
    changes = start.settings(**SFT, data__train=conversations(start), model__path=chat)
    changes |= {"data__eval": held, "eval__tasks": 8}
    with (
        pytest.raises(DataError, match=r"Held-out rows: Row 1.*empty"),
        open_run(small(**changes), tmp_path / "refused", quiet()),
    ):
        pass
    said = io.StringIO()
    with open_run(
        small(**changes, data__drop_bad=True), tmp_path / "dropped", Display(said, live=False)
    ) as run:
        assert [task.id for task in run.parts.held_out] == [0]
    assert "1 of 3 held-out rows can't be learned and were left out" in said.getvalue()
    assert "1 of 3 held-out rows are longer than" in said.getvalue()
    kept = json.loads((tmp_path / "dropped" / "manifest.json").read_text())
    assert kept["dropped_rows"] == {"held out": 2}


@pytest.mark.parametrize("recipe", ["grpo", "dpo", "kto", "reward_model", "spin"])
def test_settings_of_such_rows_are_refused_where_nobody_reads_them(recipe: str) -> None:
    for setting in ({"data__turns": "last"}, {"data__max_row_tokens": 9}):
        with pytest.raises(ConfigError, match=f"would be ignored by {recipe}"):
            check_config(small(recipe=recipe, **setting))


def test_one_row_is_shown_with_what_is_learned(start: Start, chat: str, tmp_path: Path) -> None:
    config = small(**start.settings(**SFT, data__train=conversations(start), model__path=chat))
    said = io.StringIO()
    with open_run(config, tmp_path, Display(said, live=False)):
        pass
    assert "row 0 as it is learned (learned in [[...]]):\n0+1=[[1<end>]]0+2=[[0,2;2<end>]]" in (
        said.getvalue()
    )


def test_held_out_rows_are_measured_by_likelihood(start: Start, chat: str, tmp_path: Path) -> None:
    """Where nothing can be graded nothing is sampled, and the best checkpoint goes by it."""
    held = start.rows("held", [talk(f"{a}+3", f"{a + 3}") for a in range(5)])
    changes = start.settings(**SFT, data__train=conversations(start), model__path=chat)
    config = small(**changes | {"data__eval": held, "eval__tasks": 4, "eval__every": 2, "steps": 4})
    said = io.StringIO()
    summary = train(config, tmp_path, Display(said, live=False))
    assert "eval/nll and eval/token_accuracy say how well they are known" in said.getvalue()
    lines = metrics(tmp_path)
    assert lines[-1]["eval/nll"] < lines[0]["eval/nll"] and "eval/accuracy" not in lines[-1]
    assert 0 <= lines[-1]["eval/token_accuracy"] <= 1
    assert summary["nll_after"] == lines[-1]["eval/nll"] and summary["nll_before"] is not None
    assert (tmp_path / "checkpoints" / "best").exists()
    assert "Held-out −log p" in (tmp_path / "report.html").read_text()
    assert "held-out nll" in said.getvalue() and "held-out accuracy" not in said.getvalue()


def test_likelihood_and_samples_are_measured_side_by_side(start: Start, tmp_path: Path) -> None:
    with start.opened(tmp_path, **SFT, data__eval=start.tasks("held_sums", [(1, 2), (3, 4)]),
                      eval__tasks=2) as run:  # fmt: skip
        found = run.stage.evaluate(run.parts)
        rows = [task.row for task in run.parts.held_out]
        sequences = Sequences([r.prompt_ids for r in rows], [r.token_ids for r in rows])
        logp_NT = plain_logp(run.parts.loaded.model, sequences)
        likeliest = [
            full_logp(run.parts.loaded.model, r.prompt_ids, r.token_ids).argmax(-1) for r in rows
        ]
    nll = -float(logp_NT.sum()) / float(sequences.mask().sum())
    assert found.others["eval/nll"] == pytest.approx(nll, rel=1e-5)
    right = [(x == torch.tensor(r.token_ids)) for x, r in zip(likeliest, rows, strict=True)]
    assert found.others["eval/token_accuracy"] == pytest.approx(
        float(torch.cat(right).float().mean())
    )
    assert found.reward is not None and len(found.by_task["eval/nll"]) == 2


def test_rates_are_those_of_supervised_learning_unless_set() -> None:
    plain = {"data.train": "arithmetic", "model.path": "tiny"}
    for name, rate in (("sft", 2e-5), ("dft", 2e-5), ("grpo", 1e-6)):
        found = load(plain | {"recipe": name}).optim.learning_rate
        assert found == pytest.approx(rate)
        adapted = load(plain | {"recipe": name, "adapter.rank": 4}).optim.learning_rate
        assert adapted == pytest.approx(10 * rate)
    assert load(plain | {"recipe": "sft", "optim.learning_rate": 1e-4}).optim.learning_rate == 1e-4
