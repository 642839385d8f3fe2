"""The panel of ranks on a run's page: means of its last steps, and nothing of one process."""

from __future__ import annotations

from pathlib import Path

from viewing import get, make_run, viewing

from groupwise.runfiles.recorder import Recorder
from groupwise.view.ranks import ranks_of
from groupwise.view.runs import ViewedRun


def test_ranks_are_shown_with_what_they_waited(tmp_path: Path) -> None:
    run = make_run(tmp_path / "one", steps=2)
    seen = ViewedRun(run.path, "one")
    seen.refresh()
    assert ranks_of(seen) is None
    with viewing(run.path) as port:
        assert 'id="ranks"' not in get(port, "/runs/one")[1]
    with Recorder(run) as made:
        for step in range(3, 33):  # three ranks at first, then two
            waits = {0: 0.5, 1: 1.0 if step > 12 else 9.0, **({2: 3.0} if step < 20 else {})}
            made.step(step, [], {
                "time/step": 4.0, "time/rank_imbalance": 1.25, "time/rank_gather": 0.125,
                **{f"time/rank_wait_{rank}": x for rank, x in waits.items()},
            })  # fmt: skip
    seen.refresh()
    found = ranks_of(seen)
    assert found is not None and found["steps"] == 20
    assert found["rows"] == [
        {"rank": "0", "waits": "0.50 s", "share": "12.5 %"},
        {"rank": "1", "waits": "1.00 s", "share": "25 %"},
    ]
    assert found["imbalance"] == "1.25" and found["gather"] == "0.12 s"
    with viewing(run.path) as port:
        status, page, _ = get(port, "/runs/one")
    assert status == 200 and 'id="ranks"' in page and "0.50 s" in page
