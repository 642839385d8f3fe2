"""What can be done on the pages of runs, in a real browser: sort, find, pin, zoom, note, export."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browsing import CHROMIUM, chromium, sound_page
from viewing import add_steps, make_run, viewing

from groupwise.cli import main
from groupwise.runfiles.folder import Event
from groupwise.view.notes import read_notes

sync_api = pytest.importorskip(
    "playwright.sync_api", reason="no Playwright: pip install playwright"
)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: apt-get install chromium")

REWARD = '.chart[data-name="reward/mean"]'
LENGTH = '.chart[data-name="length/mean"]'


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with chromium(sync_api, tmp_path_factory.mktemp("home")) as made:
        yield made


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    with sound_page(browser, ("http://127.0.0.1", "data:")) as made:
        yield made


def names(page: Any) -> list[str]:
    return list(page.locator(".runs tbody tr:visible .run-name").all_inner_texts())


def test_runs_are_sorted_found_and_laid_over_each_other(page: Any, tmp_path: Path) -> None:
    make_run(tmp_path / "b", 3)
    live = make_run(tmp_path / "a", 1, config='steps = 4\nrecipe = "dapo"\n')
    for arm in ("one", "two"):
        for seed in range(2):
            make_run(tmp_path / f"sweep/runs/{arm}/seed_{seed}", 5)
    (tmp_path / "sweep/plan.json").write_text("{}")
    with viewing(tmp_path) as port:
        page.goto(f"http://127.0.0.1:{port}/")
        assert names(page)[:2] == ["a", "b"]
        head = page.get_by_role("button", name="training reward").first
        head.click()
        assert names(page)[:2] == ["b", "a"]  # 0.15 before 0.05
        head.click()
        assert names(page)[:2] == ["a", "b"]
        page.fill("#search", "dapo")
        assert names(page) == ["a"]
        assert page.locator("#shown").inner_text() == "1 of 6 runs"
        page.fill("#search", "")
        assert page.locator(".run-name").first.get_attribute("title") == str(tmp_path / "a")
        # What is written while one looks appears, here and in the bar.
        add_steps(live, 2, 3)
        page.wait_for_function(
            "() => document.querySelector('[data-run=a] [data-key=reward]').textContent"
            " === '0.05 → 0.15'"
        )
        assert page.locator("[data-run=a] progress").evaluate("x => x.value") == 0.75
        page.get_by_role("link", name="arms, with bands over seeds").click()
        shown = f"() => document.querySelector('{REWARD} .plot')?.data?.length"
        page.wait_for_function(f"() => ({shown})() === 6")  # two arms: lowest, highest, mean
        assert page.locator("#arms tbody tr").count() == 2
        page.locator("#by-arm").uncheck()
        page.wait_for_function(f"() => ({shown})() === 4")  # four runs of five steps


def test_a_new_run_comes_in_without_a_word_lost(page: Any, tmp_path: Path) -> None:
    """What is ticked, sorted and searched for stays, also on the way back from a run."""
    for name, steps in (("a", 1), ("b", 3)):
        make_run(tmp_path / name, steps)
    with viewing(tmp_path) as port:
        page.goto(f"http://127.0.0.1:{port}/")
        page.evaluate("window.same = true")
        page.get_by_label("compare a").check()
        page.get_by_role("button", name="training reward").click()
        make_run(tmp_path / "c", 2)
        page.locator("[data-run=c]").wait_for()
        assert page.evaluate("window.same") and page.get_by_label("compare a").is_checked()
        assert names(page) == ["b", "c", "a"]  # 0.15, 0.1, 0.05
        page.locator("[data-run=c] .state").click()  # a row leads where its name does
        page.wait_for_url("**/runs/c")
        page.goto(f"http://127.0.0.1:{port}/")
        assert names(page) == ["b", "c", "a"]


def test_a_time_is_shown_as_that_of_whoever_looks(browser: Any, tmp_path: Path) -> None:
    run = make_run(tmp_path / "one", 1)
    start = {"step": 0, "time/at": "2026-01-02T22:30:00Z", "changed": [], "config": ""}
    run.starts.write_text(json.dumps(start) + "\n")
    with (
        viewing(tmp_path) as port,
        sound_page(browser, ("http://127.0.0.1", "data:"), timezone_id="Asia/Tokyo") as page,
    ):
        for path in ("/", "/runs/one"):
            page.goto(f"http://127.0.0.1:{port}{path}")
            assert page.locator("time").inner_text() == "2026-01-03 07:30"
            assert page.locator("time").get_attribute("title") == "2026-01-02 22:30 UTC"


def test_arms_say_their_mean_under_short_names(page: Any, tmp_path: Path) -> None:
    for arm, steps in (("one", 2), ("two", 4)):
        for seed in range(2):
            make_run(tmp_path / f"sweep/runs/{arm}/seed_{seed}", steps)
    (tmp_path / "sweep/plan.json").write_text("{}")
    with viewing(tmp_path) as port:
        page.goto(f"http://127.0.0.1:{port}/compare?group=sweep")
        rows = page.locator("#arms tbody tr td:first-child")
        assert [x.strip() for x in rows.all_inner_texts()] == ["one", "two"]
        said = page.locator(f"{REWARD} .said").first
        page.wait_for_function(
            f"() => /step/.test(document.querySelector('{REWARD} .said').textContent)"
        )
        # Where nothing is pointed at: the last values, each in its arm's colour.
        assert said.inner_text() == "step 4: 0.1 (step 2), 0.2"
        assert said.locator("span.c1").inner_text() == "0.2"


def test_a_page_is_not_made_anew_under_a_note(page: Any, tmp_path: Path) -> None:
    run = make_run(tmp_path / "one", 1)
    with viewing(tmp_path) as port:
        page.goto(f"http://127.0.0.1:{port}/runs/one")
        page.locator(f"{REWARD} path.js-line").first.wait_for(state="attached")
        page.locator("#notes summary").click()
        page.fill("textarea[name=note]", "half a thought")
        run.add_metrics('{"step": 2, "reward/mean": 0.5, "brand/new": 1.0}')
        page.wait_for_function(
            "() => document.getElementById('state').textContent.includes('Step 2')"
        )
        assert page.locator("textarea[name=note]").input_value() == "half a thought"
        assert not page.locator('[data-name="brand/new"]').count()
        page.locator("#notes summary").click()
        run.add_metrics('{"step": 3, "reward/mean": 0.5, "brand/new": 1.0}')
        page.locator('[data-name="brand/new"]').wait_for(state="attached")


def test_charts_are_found_pinned_linked_and_read_together(page: Any, tmp_path: Path) -> None:
    run = make_run(tmp_path / "one")
    run.add_events([Event(n, "refill", f"drew {n} groups more") for n in range(7, 10)])
    with viewing(tmp_path) as port:
        address = f"http://127.0.0.1:{port}/runs/one"
        page.goto(address)
        page.locator(f"{REWARD} path.js-line").first.wait_for(state="attached")
        assert "3 times, steps 7 to 9" in page.locator("#events").inner_text()
        # A metric that never changes is out of the way until it is asked for.
        constant = page.locator('.chart[data-name="groups/dead_share"]')
        assert constant.is_hidden()
        page.fill("#find-metric", "dead_share")
        constant.locator("path.js-line").first.wait_for(state="attached")
        assert constant.is_visible() and page.locator(REWARD).first.is_hidden()
        # 25 % is healthy: the band goes up to a half, and no further than what is drawn of shares.
        band = constant.locator(".plot").evaluate(
            "x => x.layout.shapes.find(s => s.type === 'rect')"
        )
        assert (band["y0"], band["y1"]) == (-0.02, 0.5)
        constant.get_by_role("button", name="pin").click()
        page.fill("#find-metric", "")
        page.goto(address)
        page.locator("#pinned .chart path.js-line").first.wait_for(state="attached")
        assert page.locator("#pinned .chart").get_attribute("data-name") == "groups/dead_share"
        # One chart's part of x is that of all, and so is the step under the pointer.
        page.locator(f"{LENGTH} path.js-line").first.wait_for(state="attached")
        page.evaluate(
            f"Plotly.relayout(document.querySelector('{REWARD} .plot'),"
            " {'xaxis.range[0]': 2, 'xaxis.range[1]': 6})"
        )
        page.wait_for_function(
            f"() => String(document.querySelector('{LENGTH} .plot').layout.xaxis.range) === '2,6'"
        )
        chart = page.locator(REWARD).first
        chart.focus()
        page.keyboard.press("Home")
        for _ in range(2):
            page.keyboard.press("ArrowRight")
        assert chart.locator(".said").inner_text() == "step 3: 0.15"
        assert page.locator(f"{LENGTH} .said").first.inner_text() == "step 3: 4"
        assert page.locator(f"{LENGTH} .cross").first.is_visible()
        # The line goes along with the part of x that is looked at.
        place = "x => parseFloat(x.style.left)"
        before = chart.locator(".cross").evaluate(place)
        page.evaluate(
            f"Plotly.relayout(document.querySelector('{REWARD} .plot'),"
            " {'xaxis.range[0]': 3, 'xaxis.range[1]': 9})"
        )
        assert chart.locator(".cross").evaluate(place) < before - 20
        # Sections that were opened are open again, here and in other runs.
        page.locator("#charts summary", has_text="Length and tokens").click()
        page.wait_for_function("() => localStorage.getItem('groupwise.sections')")
        page.get_by_role("button", name="reset zoom").click()
        page.wait_for_function(
            f"() => document.querySelector('{LENGTH} .plot').layout.xaxis.range[1] > 9"
        )
        page.goto(address)
        section = page.locator("#charts details", has_text="Length and tokens")
        assert section.get_attribute("open") is not None


def test_a_note_is_saved_from_the_page(page: Any, tmp_path: Path) -> None:
    run = make_run(tmp_path / "one", 1)
    with viewing(tmp_path) as port:
        page.goto(f"http://127.0.0.1:{port}/runs/one")
        page.locator("#notes summary").click()
        page.fill("input[name=tags]", "good, <i>long</i>")
        page.fill("textarea[name=note]", "kept")
        page.get_by_role("button", name="Save").click()
        page.wait_for_function("() => document.getElementById('notes-said').textContent")
        assert page.locator("#tags .tag").all_inner_texts() == ["good", "<i>long</i>"]
    assert read_notes(run).tags == ("good", "<i>long</i>")


def test_a_link_to_a_token_opens_it(page: Any, tmp_path: Path) -> None:
    make_run(tmp_path / "one", 1)
    with viewing(tmp_path) as port:
        page.goto(f"http://127.0.0.1:{port}/runs/one/step/1/group/0/sample/2#token=3&by=entropy")
        page.locator("#heat span.now").wait_for()
        assert page.locator("#heat span.now").inner_text() == "v"
        assert page.locator("#stream").input_value() == "entropy"
        page.locator("#fixed").check()  # 0.75 of 3 nats
        assert page.locator("#heat span").first.evaluate(
            "t => t.style.getPropertyValue('--heat')") == "21%"  # fmt: skip
        page.keyboard.press("Tab")
        page.locator("#heat span").nth(3).click()
        page.get_by_role("button", name="link to this token").click()
        assert page.url.endswith("#token=4&by=entropy")


def test_a_sample_is_read_from_its_beginning(browser: Any, tmp_path: Path) -> None:
    """The page stays where it is while tokens are read, also where they are far down."""
    make_run(tmp_path / "one", 1)
    with viewing(tmp_path) as port, sound_page(browser, ("http://127.0.0.1", "data:")) as page:
        page.set_viewport_size({"width": 390, "height": 400})
        page.goto(f"http://127.0.0.1:{port}/runs/one/step/1/group/0/sample/2")
        page.locator("#heat span.now").wait_for()
        assert page.evaluate("scrollY") == 0


def test_an_exported_run_opens_without_a_server(browser: Any, tmp_path: Path) -> None:
    run = make_run(tmp_path / "one")
    run.add_events([Event(9, "x", "</script><script>window.hit=1</script>")])
    file = tmp_path / "one.html"
    assert main(["view", "--export", str(run.path), str(file)]) == 0
    with sound_page(browser, ("file://", "data:"), offline=True) as page:
        page.goto(file.as_uri())
        page.locator(f"{REWARD} path.js-line").first.wait_for(state="attached")
        assert page.evaluate("window.hit") is None
        assert "window.hit=1" in page.locator("#events").inner_text()
        assert "4 at step 10" in page.locator("main").inner_text()
        page.fill("#find-metric", "entropy")
        assert page.locator(".chart:visible").count() == 2
    assert main(["view", "--export", str(run.path), str(tmp_path / "one.txt")]) != 0
