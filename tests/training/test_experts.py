"""Runs of a mixture of experts: which routes are recorded, replayed, measured and shown."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from runs import metrics, run
from steps import Start, advance, full_logp, gather, weights
from torch import Tensor

from groupwise.model.layers.attention import packed, packed_positions
from groupwise.model.layers.experts import Router
from groupwise.model.layers.routes import Routes
from groupwise.model.layers.transformer import Transformer
from groupwise.prepare.recorded import groups_of
from groupwise.replay.methods import methods_of
from groupwise.replay.recorded import open_recorded
from groupwise.replay.replay import Replay
from groupwise.runfiles.folder import RunFolder
from groupwise.runfiles.rollouts import read
from groupwise.view.answers import sample_page
from groupwise.view.runs import ViewedRun

MIXTURE: dict[str, Any] = {"model__path": "tiny", "tiny__experts": 4, "tiny__cold_start_steps": 80}


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Start:
    return Start(tmp_path_factory.mktemp("start"))


def live_routes(model: Transformer, ids: tuple[int, ...]) -> Tensor:
    """The experts of one sequence alone."""
    routes = Routes()
    with torch.no_grad():
        model(torch.tensor(ids), packed_positions([len(ids)]), packed([len(ids)]), routes=routes)
    assert routes.chosen_TLK is not None
    return routes.chosen_TLK


def test_the_sampler_records_the_experts_that_the_learner_would_choose(
    start: Start, tmp_path: Path
) -> None:
    """Of the prompt and all but the last token of every answer."""
    with start.opened(tmp_path, recipe="routing_replay_r3", **MIXTURE) as made:
        model = made.parts.loaded.model
        for group in gather(made).groups:
            for rollout in group:
                read_ids = (*rollout.task.token_ids, *rollout.completion.token_ids)[:-1]
                recorded = rollout.completion.routes_TLK
                assert recorded is not None and recorded.dtype == torch.int16
                assert torch.equal(recorded, live_routes(model, read_ids))
                alone = full_logp(model, rollout.task.token_ids, rollout.completion.token_ids)
                assert alone.isfinite().all()


@pytest.mark.parametrize("name", ["routing_replay", "routing_replay_r3"])
def test_everything_is_replayed_and_files_hold_the_routes(
    name: str, start: Start, tmp_path: Path
) -> None:
    changes = {"recipe": name, "recipe__schedule__updates": 3, "optim__learning_rate": 0.03}
    with start.opened(tmp_path, **changes, **MIXTURE) as made:
        advance(made, 2)
        made.reporter.recorder.flush()
    for line in metrics(tmp_path):
        assert line["router/replayed_share"] == 1.0 and line["router/missing_share"] == 0.0
        assert 0 < line["router/changed_share"] < 1
        shares = [line[f"router/changed_share/{layer}"] for layer in range(2)]
        assert line["router/changed_share"] == pytest.approx(sum(shares) / 2)
    table = read(RunFolder(tmp_path).rollout(2))
    recorded = [r.completion.routes_TLK for group in groups_of(table) for r in group]
    assert all((x is not None) == (name == "routing_replay_r3") for x in recorded)
    changed = table.column("rerouted").to_pylist()
    assert all(0 <= share <= 1 for row in changed for share in row)
    assert any(share > 0 for row in changed for share in row)
    page = sample_page(ViewedRun(tmp_path, "a"), 2, 0, 0)
    mean = sum(changed[0]) / len(changed[0])
    assert "experts changed" in page and f"{100 * mean:.3g}" in page.replace("&#37;", "%")


def test_recording_routes_changes_nothing_else(start: Start, tmp_path: Path) -> None:
    """The same weights; in one update a batch no token goes elsewhere."""
    found = []
    for name, record in (("with", True), ("without", False)):
        with start.opened(tmp_path / name, engine__record_routes=record, **MIXTURE) as made:
            advance(made, 2)
            made.reporter.recorder.flush()
            found.append(weights(made.parts.loaded.model))
    assert torch.equal(*found)
    assert [line["router/changed_share"] for line in metrics(tmp_path / "with")] == [0.0, 0.0]
    assert not any("router/changed_share" in line for line in metrics(tmp_path / "without"))
    assert all("router/load_entropy" in line for line in metrics(tmp_path / "without"))


@pytest.mark.parametrize("frozen", [True, False])
def test_a_frozen_router_stays_as_it_is(frozen: bool, start: Start, tmp_path: Path) -> None:
    with start.opened(tmp_path, model__freeze_router=frozen, **MIXTURE) as made:
        model = made.parts.loaded.model
        routers = [x.weight for x in model.modules() if isinstance(x, Router)]
        before, every = [x.detach().clone() for x in routers], weights(model)
        advance(made)
        same = [torch.equal(a, b) for a, b in zip(before, routers, strict=True)]
        assert same == [frozen] * 2 and not torch.equal(every, weights(model))


def test_a_frozen_router_stays_so_behind_a_resume(tmp_path: Path) -> None:
    changes = {"tiny__experts": 4, "model__freeze_router": True}
    run(tmp_path / "once", steps=2, **changes)
    run(tmp_path / "twice", steps=1, **changes)
    run(tmp_path / "twice", steps=2, **changes)
    last = [metrics(tmp_path / name)[-1]["weights/fingerprint"] for name in ("once", "twice")]
    assert last[0] == last[1]


def test_a_replay_goes_where_the_file_says(start: Start, tmp_path: Path) -> None:
    """Gradients of R3 are those of the live routes where these are the recorded ones."""
    with start.opened(tmp_path, engine__record_routes=True, **MIXTURE) as made:
        advance(made)
        made.reporter.recorder.flush()
    recorded = open_recorded(tmp_path)
    asked = ["dr_grpo", "dr_grpo recipe.correction=\"replay_routing('sampler')\""]
    replay = Replay(recorded, methods_of(recorded, asked), [1], gradients=True)
    for _ in replay:
        pass
    for method in replay.result()["methods"]:
        assert method["parameter_cosine"] == pytest.approx(1.0, abs=1e-6)
