"""Engines of one's own: named by the configuration, and looked at before anything is learned."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_zoo import engine, request, same
from runs import left_behind, quiet, small

from groupwise.config import load
from groupwise.engine import backends
from groupwise.engine.batch import BatchEngine
from groupwise.engine.native.engine import NativeEngine
from groupwise.engine.protocol import Capabilities, Engine, Request, Sampling
from groupwise.errors import ConfigError, EngineError, RunError
from groupwise.evaluate.evaluate import evaluate_path
from groupwise.prepare.engines import engine_of
from groupwise.probing.probe import ProbeRequest, prepare_probe
from groupwise.records import Completion
from groupwise.stages.checks import check_config
from groupwise.stages.consequences import anchored
from groupwise.stages.describe import describe
from groupwise.training.loop import train
from groupwise.training.opening import open_run
from groupwise.watch.display import Display

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "transformers_engine.py"
THEIRS = f"{EXAMPLE}:TransformersEngine"
SAMPLING = Sampling(max_tokens=6)

# The native engine behind the shortest class that can be written.
WRAPPED = """
from groupwise import BatchEngine, Capabilities, Engine
from groupwise.engine.native.engine import NativeEngine

class Wrapped(BatchEngine):
    capabilities = Capabilities(own_randomness=False)

    def __init__(self, setup):
        self.inner = NativeEngine.made(setup)

    def sync(self, version):
        super().sync(version)
        self.inner.sync(version)

    def answer(self, requests, sampling):
        return self.inner.generate(requests, sampling)

class Half(BatchEngine):
    pass

class Older(Engine):
    def __init__(self, loaded):
        self.inner = NativeEngine(loaded.model, loaded.tokenizer, seed=0, slots=0)

    def sync(self, version):
        self.inner.sync(version)

    def generate(self, requests, sampling):
        return self.inner.generate(requests, sampling)

class Elsewhere(Older):
    weights = "elsewhere"

    def generate(self, requests, sampling):
        return []

class Nothing:
    pass
"""


@pytest.fixture
def own(tmp_path: Path) -> str:
    (tmp_path / "own.py").write_text(WRAPPED)
    return f"{tmp_path}/own.py:Wrapped"


def metrics(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


# --- submit and finished ------------------------------------------------------------------------


def test_generate_is_submit_and_finished() -> None:
    requests = [request(4 + n, 2, n) for n in range(3)]
    wanted = engine(slots=2).generate(requests, SAMPLING)
    sampler = engine(slots=2)
    tickets = sampler.submit(requests, SAMPLING)
    found: dict[int, list[Completion]] = {}
    while len(found) < 3:
        some = sampler.finished()
        assert some and not found.keys() & {ticket for ticket, _ in some}
        found.update(some)
    assert sampler.finished() == []
    for ticket, group in zip(tickets, wanted, strict=True):
        assert all(same(a, b) for a, b in zip(found[ticket], group, strict=True))


def test_batches_of_other_sampling_come_one_after_the_other() -> None:
    sampler, short = engine(slots=4), Sampling(max_tokens=2)
    first = sampler.submit([request(4, 2, 0)], SAMPLING)
    second = sampler.submit([request(5, 3, 1)], short)
    assert len({*first, *second}) == 2
    ((ticket, group),) = sampler.finished()
    assert [ticket] == first and len(group) == 2
    ((ticket, group),) = sampler.finished()
    assert [ticket] == second and {len(one.token_ids) for one in group} == {2}


def test_what_is_cancelled_never_comes_and_the_rest_is_the_same() -> None:
    requests = [request(4 + n, 2, n) for n in range(3)]
    wanted = engine().generate(requests, SAMPLING)
    sampler = engine(slots=2)
    tickets = sampler.submit(requests, SAMPLING)
    sampler.cancel([tickets[1]])
    found = dict(sampler.finished())
    while len(found) < 2:
        found.update(sampler.finished())
    assert sampler.finished() == [] and found.keys() == {tickets[0], tickets[2]}
    for number in (0, 2):
        assert all(same(a, b) for a, b in zip(found[tickets[number]], wanted[number], strict=True))


def test_weights_do_not_change_under_requests() -> None:
    sampler = engine()
    tickets = sampler.submit([request(4, 2, 0)], SAMPLING)
    with pytest.raises(EngineError, match="1 requests are under way"):
        sampler.sync(1)
    sampler.cancel(tickets)
    sampler.sync(1)
    assert sampler.source.version == 1


def test_a_call_that_is_broken_off_leaves_nothing_under_way() -> None:
    sampler = engine(slots=2)

    def stop(number: int, group: list[Completion]) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sampler.generate([request(4 + n, 2, n) for n in range(3)], SAMPLING, done=stop)
    assert sampler.finished() == []
    sampler.sync(1)


def test_each_group_is_told_once_also_where_memory_ran_out(monkeypatch: Any) -> None:
    """Half way: what was handed in stays, the rest is sampled again with fewer slots."""
    from groupwise.engine.native.scheduler import Scheduler

    requests = [request(4 + n, 2, n) for n in range(4)]
    wanted = engine(slots=2).generate(requests, SAMPLING)
    forward, steps = Scheduler._forward, iter(range(1000))

    def failing(self: Scheduler) -> None:
        if next(steps) == 8:
            raise MemoryError
        forward(self)

    monkeypatch.setattr(Scheduler, "_forward", failing)
    said: list[str] = []
    told: list[int] = []
    wrote: list[tuple[int, int]] = []
    sampler = engine(slots=2, tell=lambda kind, text: said.append(kind))
    found = sampler.generate(
        requests,
        SAMPLING,
        done=lambda number, group: told.append(number),
        wrote=lambda *counts: wrote.append(counts),
    )
    assert said == ["memory"] and sorted(told) == [0, 1, 2, 3] and told[0] == 0
    assert wrote[-1] == (8, sum(len(c.token_ids) for group in found for c in group))
    for a, b in zip(wanted, found, strict=True):
        assert all(same(x, y) for x, y in zip(a, b, strict=True))


# --- what is handed in --------------------------------------------------------------------------


class Says(BatchEngine):
    """Answers with what a test gives it."""

    def __init__(self, *completions: Any, groups: int | None = None) -> None:
        self.completions, self.groups = list(completions), groups

    def answer(self, requests: Sequence[Request], sampling: Sampling) -> list[list[Completion]]:
        return [self.completions] * (len(requests) if self.groups is None else self.groups)


GOOD = Completion((1, 2), torch.tensor([-1.0, -2.0]), "eos", 0)


@pytest.mark.parametrize(
    ("says", "words"),
    [
        (Says(GOOD), "wrote 1 completions for prompt 3, and 2 were asked for"),
        (Says(GOOD, GOOD, GOOD), "wrote 3 completions for prompt 3, and 2 were asked for"),
        (Says(GOOD, GOOD, groups=2), "answered 2 requests of 1. Its `answer` must return"),
        (Says(GOOD, replace(GOOD, token_ids=())), "completion 1 of prompt 3 has 0 tokens; 1 to 6"),
        (Says(GOOD, replace(GOOD, token_ids=(1,) * 7)), "has 7 tokens; 1 to 6 can be"),
        (Says(GOOD, replace(GOOD, logp_T=None)), "no log-probabilities (logp_T is None). Give a"),
        (Says(GOOD, replace(GOOD, logp_T=[-1.0, -2.0])), "no log-probabilities (logp_T is [-1.0"),
        (Says(GOOD, replace(GOOD, logp_T=torch.zeros(1))), "2 tokens and log-probabilities of "
         "shape (1,). Give one for every token"),
        (Says(GOOD, replace(GOOD, logp_T=torch.tensor([-1.0, float("nan")]))), "not finite"),
        (Says(GOOD, replace(GOOD, routes_TLK=torch.zeros(2, 1, 1, dtype=torch.int16))),
         "has experts of 2 tokens, and prompt and answer without the last token have 5"),
        (Says(GOOD, replace(GOOD, finish="stopped")), "ended by 'stopped'. Say what ended it"),
        (Says(GOOD, replace(GOOD, weights="int8")), "sampled from weights 'int8', and the engine's "
         "capabilities say 'shared'"),
    ],
)  # fmt: skip
def test_answers_that_cannot_be_learned_from_are_refused(says: Says, words: str) -> None:
    with pytest.raises(EngineError, match=re.escape(words)) as why:
        says.generate([request(4, 2, 3)], SAMPLING)
    assert "engine Says" in str(why.value)
    assert says.finished() == []  # the broken call leaves nothing behind


def test_likeliest_tokens_that_were_asked_for_must_be_there() -> None:
    sampling = Sampling(max_tokens=6, record_top_k=3)
    with pytest.raises(EngineError, match="lacks the 3 likeliest tokens"):
        Says(GOOD).generate([request(4, 1, 0)], sampling)
    engine().generate([request(4, 1, 0)], sampling)


class Silent(Says):
    def finished(self, wrote: Any = None) -> Any:
        return []


class Twice(Says):
    def finished(self, wrote: Any = None) -> Any:
        return super().finished(wrote) * 2


@pytest.mark.parametrize(
    ("says", "words"),
    [
        (Silent(GOOD), "engine Silent says that nothing is finished.*must wait"),
        (Twice(GOOD), "engine Twice hands in a request under ticket 0, which nobody waits for"),
    ],
)
def test_tickets_come_back_once(says: Says, words: str) -> None:
    with pytest.raises(EngineError, match=words):
        says.generate([request(4, 1, 0)], SAMPLING)


def test_a_state_that_nobody_restores_is_refused() -> None:
    Says().restore({})
    with pytest.raises(EngineError, match="engine Says has none to restore"):
        Says().restore({"x": torch.zeros(1)})


# --- names --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("nativ", "'nativ' names no engine. Did you mean 'native'? For one of your own write"),
        ("vortex", "'vortex' names no engine. Known: native, sglang, vllm. For one of your own"),
        ("gone.py:Mine", "There is no file 'gone.py' to load an engine from"),
        ("{own}:Wraped", "own.py has no class 'Wraped'. Did you mean 'Wrapped'?"),
        ("{own}:Half", "is no whole engine: Half does not define answer. Write what is missing"),
        ("{own}:Nothing", "is no engine: <class"),
        ("{broken}:X", "broken.py, line 2: ZeroDivisionError"),
    ],
)
def test_a_name_that_is_no_engine_is_refused(
    name: str, words: str, own: str, tmp_path: Path
) -> None:
    (tmp_path / "broken.py").write_text("x = 1\n1 / 0\n")
    name = name.format(own=tmp_path / "own.py", broken=tmp_path / "broken.py")
    with pytest.raises(EngineError, match=re.escape(words)):
        check_config(small(engine__backend=name))


def test_a_mended_file_is_read_again(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("1 / 0\n")
    with pytest.raises(EngineError, match="ZeroDivisionError"):
        backends.backend(f"{file}:Wrapped")
    file.write_text(WRAPPED)
    assert backends.backend(f"{file}:Wrapped").__name__ == "Wrapped"


def test_a_file_beside_the_configuration_is_meant(own: str, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text('[engine]\nbackend = "own.py:Wrapped"\n')
    assert load(tmp_path / "run.toml").engine.backend == own


def test_a_second_engine_is_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"{__name__}:Says"
    monkeypatch.setitem(backends.BACKENDS, "says", name)
    assert backends.backend("says") is Says
    assert issubclass(backends.backend("native"), NativeEngine)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"engine__weights": "int8"}, "engine.weights=int8 would be ignored"),
        ({"engine__exact": True, "model__device": "cuda", "model__dtype": "bfloat16"},
         "engine.exact=true can't hold with engine.backend="),
        ({"recipe": "dppo_topk"}, "reads the sampler's likeliest tokens"),
        ({"recipe": "routing_replay_r3", "tiny__experts": 4}, "take routing_replay."),
        ({"engine__record_routes": True, "tiny__experts": 4}, "engine.record_routes=false"),
    ],
)  # fmt: skip
def test_what_an_engine_cannot_do_is_refused(changes: Any, words: str, own: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        check_config(small(**changes, engine__backend=own))


# --- runs ---------------------------------------------------------------------------------------


def test_an_engine_that_writes_generate_alone_goes_on(own: str, tmp_path: Path) -> None:
    """As files of users have them, with the model and its tokenizer for their only argument."""
    older = own.replace("Wrapped", "Older")
    train(small(steps=2), tmp_path / "native", quiet())
    train(small(steps=2), tmp_path / "given", quiet(), engine=backends.backend(older))
    train(small(steps=2, engine__backend=older), tmp_path / "named", quiet())
    left = [left_behind(tmp_path / name) for name in ("native", "given", "named")]
    for found in left:
        del found["values"]["delivered"]  # of weights that can be seen: the others show none
    assert left[0] == left[1] == left[2]


def test_an_older_engine_with_weights_of_its_own_is_not_taken_for_the_learner(
    own: str, tmp_path: Path
) -> None:
    elsewhere = backends.backend(own.replace("Wrapped", "Elsewhere"))
    with pytest.raises(EngineError, match="samples from weights 'elsewhere'"):
        train(small(steps=2), tmp_path / "run", quiet(), engine=elsewhere)


def test_a_wrapped_engine_makes_the_same_run(own: str, tmp_path: Path) -> None:
    train(small(steps=2), tmp_path / "native", quiet())
    train(small(steps=2, engine__backend=own), tmp_path / "own", quiet())
    native, mine = (left_behind(tmp_path / name) for name in ("native", "own"))
    for found in (native, mine):
        del found["values"]["delivered"]  # of weights that can be seen: the wrapper shows none
    assert native == mine


def test_everything_that_samples_asks_the_runs_own_engine(
    own: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    streams: list[tuple[str, str]] = []
    kind = backends.backend(own)
    real = Engine.generate

    def noted(self: Engine, requests: Sequence[Request], *rest: Any, **told: Any) -> Any:
        if not isinstance(self, NativeEngine):  # which it asks in turn
            streams.append((type(self).__name__, requests[0].stream))
        return real(self, requests, *rest, **told)

    monkeypatch.setattr(Engine, "generate", noted)
    config = small(steps=1, engine__backend=own)
    train(config, tmp_path / "run", quiet())
    assert set(streams) == {(kind.__name__, s) for s in ("probe", "eval", "train")}
    streams.clear()
    evaluate_path(tmp_path / "run", config)
    assert streams == [(kind.__name__, "eval")]
    prepare_probe(config, ProbeRequest(prompts=2)).run()
    assert streams[-1] == (kind.__name__, "probe")


def test_transformers_samples_and_groupwise_learns(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    config = small(steps=2, engine__backend=THEIRS, recipe="tis")
    train(config, tmp_path / "run", quiet())
    first, *later = metrics(tmp_path / "run")
    assert 0 < first["gate/mismatch_max"] < 1e-4  # other arithmetic, the same weights
    assert [line["weights/version"] for line in later] == [1, 2]
    for line in later:
        assert 0 < line["mismatch/abs_mean"] < 1e-5  # the new ones have arrived
    assert "eval/accuracy" in later[-1]
    weights = set(_column(tmp_path / "run" / "rollouts" / "step_2.parquet", "weights"))
    assert weights == {"transformers"}


def test_the_transformers_engine_delivers_adapters_and_resumes_to_the_same(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    changes = {"engine__backend": THEIRS, "adapter__rank": 4, "optim__learning_rate": 0.05}
    train(small(steps=3, **changes), tmp_path / "whole", quiet())
    train(small(steps=2, **changes), tmp_path / "parts", quiet())
    train(small(steps=3, **changes), tmp_path / "parts", quiet())
    whole, parts = (metrics(tmp_path / name) for name in ("whole", "parts"))
    assert whole[-1]["weights/fingerprint"] == parts[-1]["weights/fingerprint"]
    assert all(line["mismatch/abs_mean"] < 1e-5 for line in whole[1:])


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(max_tokens=5, temperature=0.0),
        Sampling(max_tokens=5, temperature=0.7, top_k=3),
        Sampling(max_tokens=5, top_p=0.8, min_tokens=3),
        Sampling(max_tokens=5, stop=("1", "2")),
    ],
)
def test_the_transformers_engine_records_what_it_drew_from(
    sampling: Sampling, tmp_path: Path
) -> None:
    """By the native engine's numbers: the probabilities of what it wrote are the same ones."""
    pytest.importorskip("transformers")
    with open_run(small(engine__backend=THEIRS), tmp_path / "run", quiet()) as run:
        loaded, sampler = run.parts.loaded, run.parts.engine
        prompts = [task.token_ids for task in run.parts.tasks[:4]]
        asked = [Request(ids, 16, prompt_id=n, draw=0) for n, ids in enumerate(prompts)]
        theirs = sampler.generate(asked, sampling)
        again = sampler.generate(asked, sampling)
        native = engine_of(small(), loaded).generate(asked, sampling)
    assert theirs[0][0].token_ids == again[0][0].token_ids
    ours = {
        (n, c.token_ids[:at]): float(c.logp_T[at - 1])
        for n, group in enumerate(native) for c in group
        for at in range(1, len(c.token_ids) + 1)
    }  # fmt: skip
    shared = [
        (float(c.logp_T[at - 1]), ours[n, c.token_ids[:at]])
        for n, group in enumerate(theirs) for c in group
        for at in range(1, len(c.token_ids) + 1) if (n, c.token_ids[:at]) in ours
    ]  # fmt: skip
    assert len(shared) >= 4
    assert all(a == pytest.approx(b, abs=1e-4) for a, b in shared)
    ends = loaded.tokenizer.eos_ids
    for completion in (c for group in theirs for c in group):
        text = loaded.tokenizer.decode(completion.token_ids)
        assert (completion.finish == "eos") == (completion.token_ids[-1] in ends)
        assert len(completion.token_ids) >= sampling.min_tokens
        if completion.finish == "stop":
            assert text.endswith(sampling.stop)


def _column(file: Path, name: str) -> list[Any]:
    import pyarrow.parquet as parquet  # type: ignore[import-untyped]

    found: list[Any] = parquet.read_table(file)[name].to_pylist()
    return found


def test_weights_of_its_own_are_no_anchor() -> None:
    """Several updates a batch: the sampler stands for the policy only where it is the policy."""
    several = {"recipe": "grpo", "recipe.schedule.updates": 2}
    config = small(**several)
    theirs = replace(config, engine=replace(config.engine, backend=THEIRS))
    assert anchored(config, config.recipe).ratio["anchor"] == "sampler"  # type: ignore[arg-type]
    assert anchored(theirs, theirs.recipe).ratio["anchor"] == "old"  # type: ignore[arg-type]
    assert "sampled from other weights (transformers)" in describe(small(engine__backend=THEIRS))[0]


def test_an_engine_given_by_hand_fits_the_configuration(tmp_path: Path) -> None:
    class Other(Says):
        capabilities = Capabilities(weights="other")

    with pytest.raises(EngineError, match=r"engine Other samples from weights 'other'.*Name the"):
        train(small(), tmp_path / "run", quiet(), engine=lambda loaded: Other())
    with pytest.raises(EngineError, match=r"made 'native', which is no engine. Return a subclass"):
        train(small(), tmp_path / "run", quiet(), engine=lambda loaded: "native")  # type: ignore


def test_what_an_engine_tells_is_shown_and_written_down(tmp_path: Path) -> None:
    """Also while it is being made, when the run is not there yet."""
    (tmp_path / "loud.py").write_text(
        WRAPPED.replace(
            "self.inner = NativeEngine.made(setup)",
            "self.inner, self.tell = NativeEngine.made(setup), setup.tell\n"
            "        self.tell('start', 'warming up')",
        ).replace(
            "        return self", "        self.tell('engine', 'answering')\n        return self"
        )
    )
    screen = io.StringIO()
    config = small(steps=1, engine__backend=f"{tmp_path}/loud.py:Wrapped")
    train(config, tmp_path / "run", Display(screen, live=False))
    assert "warming up" in screen.getvalue() and "answering" in screen.getvalue()
    assert '"answering"' in (tmp_path / "run" / "events.jsonl").read_text()


def test_an_engine_that_hides_its_own_weights_is_found_out(own: str, tmp_path: Path) -> None:
    """It says that its weights are the learner's, and samples from others."""
    (tmp_path / "lies.py").write_text(
        WRAPPED.replace(
            "NativeEngine.made(setup)",
            "NativeEngine(__import__('copy').deepcopy(setup.loaded.model), "
            "setup.loaded.tokenizer, seed=0, slots=8)\n"
            "        [p.data.mul_(1.05) for p in self.inner.source.model.parameters()]",
        )
    )
    with pytest.raises(RunError, match=r"disagree on identical weights.*capabilities"):
        config = small(engine__backend=f"{tmp_path}/lies.py:Wrapped")
        train(config, tmp_path / "run", quiet())


def test_another_engine_does_not_take_over_a_run(own: str, tmp_path: Path) -> None:
    train(small(steps=1), tmp_path / "run", quiet())
    with pytest.raises(RunError, match=r"engine\.backend.*another engine has a state of its own"):
        train(small(steps=2, engine__backend=own), tmp_path / "run", quiet())
