"""The viewer in a real browser: the whole path to a token, a run that grows, hostile text."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq  # type: ignore[import-untyped]
import pytest
from browsing import CHROMIUM, WAIT, chromium, is_trouble, sound_page
from viewing import ALPHABET, add_steps, make_run, sample, viewing

from groupwise.model.formats.tokenizer import character_files
from groupwise.runfiles import rollouts
from groupwise.runfiles.folder import Event, RunFolder

sync_api = pytest.importorskip(
    "playwright.sync_api", reason="no Playwright: pip install playwright"
)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: apt-get install chromium")

Page = Any  # of Playwright, which may be absent
REWARD = '.chart[data-name="reward/mean"]'


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with chromium(sync_api, tmp_path_factory.mktemp("home")) as made:
        yield made


@pytest.fixture
def page(browser: Any) -> Iterator[Page]:
    with sound_page(browser, ("http://127.0.0.1", "data:")) as made:
        yield made


def facts(page: Page) -> dict[str, str]:
    rows = page.locator("#token > div").all()
    return {row.locator("dt").inner_text(): row.locator("dd").inner_text() for row in rows}


def test_from_the_curves_to_a_token(page: Page, tmp_path: Path) -> None:
    make_run(tmp_path / "one")
    make_run(tmp_path / "two", 1)
    with viewing(tmp_path) as port:
        page.goto(f"http://127.0.0.1:{port}/")
        page.get_by_role("link", name="one", exact=True).click()
        chart = page.locator(REWARD).first
        chart.locator("path.js-line").first.wait_for(state="attached")
        # The rule that fired is a line through each chart; what it says is in the list.
        assert chart.locator(".shapelayer path").count() == 1
        assert page.locator("#health li").all_inner_texts() == [
            "step 4: entropy collapse: down to 0.1"
        ]
        assert "entropy collapse" in page.locator("#events tr.health").inner_text()
        assert "<b>useful</b>" in page.locator("#events").inner_text()  # as text
        # A click on the curve at a step opens it: steps 1 to 10 from left to right.
        box = chart.locator(".nsewdrag").bounding_box()
        page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 20)
        chart.locator(".cross").wait_for()
        said = chart.locator(".said").inner_text()
        step = int(re.findall(r"step (\d+)", said)[0])
        assert 4 <= step <= 7 and f"{step / 20:g}" in said
        page.mouse.click(box["x"] + box["width"] / 2, box["y"] + 20)
        page.wait_for_url(f"**/runs/one/step/{step}")
        # Groups by spread; a filter; search; keys.
        first = page.locator("#groups tbody tr").first
        assert first.locator("td").nth(4).inner_text() == "0.816"
        page.select_option("select[name=only]", "fail")
        page.wait_for_url("**only=fail**")
        assert page.locator("#groups tbody tr").count() == 2
        page.goto(f"http://127.0.0.1:{port}/runs/one/step/{step}")
        page.keyboard.press("/")
        page.keyboard.type("FIVE")
        page.keyboard.press("Enter")
        page.wait_for_url("**search=FIVE**")
        assert page.locator("#found").inner_text() == "1 of 5 groups."
        page.locator("h1").click()
        page.keyboard.press("j")
        page.keyboard.press("Enter")
        page.wait_for_url(f"**/step/{step}/group/0")
        assert page.locator(".samples .card").count() == 4
        assert page.locator(".turn.user pre").inner_text() == "What is 2+2, please (0)?"
        page.get_by_role("link", name="sample 2").click()
        # The sample, and the numbers of one token.
        page.locator("#heat span").first.wait_for()
        assert page.locator("#heat span").all_inner_texts() == ["f", "i", "v", "e", "<end>"]
        assert "another number" in page.locator("main").inner_text()
        page.locator("#heat span").nth(1).click()
        found = facts(page)
        assert found["text"] == '"i"' and found["token"] == "2 of 5"
        assert found["sampler log-probability"] == "-0.5" and found["clipped"] == "yes"
        assert found["learner − sampler"] == "0.5" and found["entropy"] == "0.75"
        assert found["reference log-probability"] == "-3" and found["advantage"] == "-1.5"
        page.keyboard.press("ArrowRight")
        assert facts(page)["text"] == '"v"'
        # Heat: the fifth token is the least likely; advantages are alike and below zero.
        shade = "t => t.className.trim().split(/ +/)[0] + t.style.getPropertyValue('--heat')"
        heat = page.locator("#heat span").evaluate_all(f"all => all.map({shade})")
        assert heat == ["hot17%", "hot34%", "hot51%", "hot68%", "hot85%"]
        page.select_option("#stream", "advantage")
        heat = page.locator("#heat span").evaluate_all(f"all => all.map({shade})")
        assert heat == ["cold85%"] * 5
        # Up again, by keys; then the prompt across the steps.
        page.keyboard.press("u")
        page.wait_for_url("**/group/0")
        page.get_by_role("link", name="prompt 100 across the steps").click()
        page.wait_for_url("**/prompt/100")
        assert page.locator("#draws tbody tr").count() == 10


def test_two_runs_over_each_other(page: Page, tmp_path: Path) -> None:
    """Both curves, what differs, and where a rule fired in either, each in its own colour."""
    make_run(tmp_path / "one", config="steps = 10\noptim.learning_rate = 1e-3\n")
    make_run(tmp_path / "two", 5, config="steps = 10\noptim.learning_rate = 1e-4\n")
    made = RunFolder(tmp_path / "two")
    made.add_events([Event(2, "health", "truncation: <b>half</b>", {"rule": "truncation"})])
    with viewing(tmp_path) as port:
        page.goto(f"http://127.0.0.1:{port}/")
        for name in ("one", "two"):
            page.get_by_label(f"compare {name}").check()
        page.get_by_role("button", name="Compare").click()
        page.wait_for_function(
            f"() => document.querySelectorAll('{REWARD} path.js-line').length === 2"
        )
        assert "learning_rate" in page.locator("#difference").inner_text()
        said = page.locator("#health li")
        assert said.all_inner_texts() == [
            "step 4: entropy collapse: down to 0.1",
            "step 4: entropy collapse: down to 0.1",
            "step 2: truncation: <b>half</b>",
        ]
        assert [each.get_attribute("class") for each in said.all()] == ["c0", "c1", "c1"]
        assert said.last.locator("a").get_attribute("href") == "/runs/two/step/2"
        lines = page.evaluate(
            f"document.querySelector('{REWARD} .plot').layout.shapes.map(s => [s.x0, s.line.color])"
        )
        first, second = (
            page.evaluate(f"getComputedStyle(document.documentElement).getPropertyValue('{name}')")
            for name in ("--run-0", "--run-1")
        )
        assert lines == [[4, first.strip()], [4, second.strip()], [2, second.strip()]]
        chart = page.locator(REWARD).first
        chart.focus()
        for _ in range(2):
            page.keyboard.press("ArrowRight")
        assert chart.locator(".said").inner_text().endswith("health: truncation: <b>half</b>")
        # What is written while one looks appears as well.
        add_steps(made, 6, 8)
        page.wait_for_function(
            f"() => document.querySelector('{REWARD} .plot').data[1].x.length === 8"
        )


def test_pictures_can_be_used_before_plotly_is_there(page: Page, tmp_path: Path) -> None:
    """Its script is large; on a slow machine the page must not wait for it."""
    run = make_run(tmp_path / "one")
    page.route("**/plotly.js", lambda route: None)  # never answered
    with viewing(run.path) as port:
        page.goto(f"http://127.0.0.1:{port}/runs/one", wait_until="commit")
        page.locator("#charts[data-ready]").wait_for()
        assert page.locator("#health li").count() == 1
        picture = page.locator(f"{REWARD} .plot > svg").first
        left, right = (float(picture.get_attribute(f"data-{side}")) for side in ("left", "right"))
        # Where step 7 of 1 to 10 stands, by the picture's own geometry.
        spot = picture.evaluate(
            "(svg, x) => { const p = new DOMPoint(x, 60).matrixTransform(svg.getScreenCTM());"
            " return [p.x, p.y]; }",
            left + (right - left) * 6 / 9,
        )
        page.mouse.move(*spot)
        assert page.locator(f"{REWARD} .said").first.inner_text() == "step 7: 0.35"
        page.mouse.click(*spot)
        page.wait_for_url("**/runs/one/step/7")
        page.unroute_all(behavior="ignoreErrors")


def test_a_run_that_goes_on(page: Page, tmp_path: Path) -> None:
    """From an empty folder over its first step to its last, without a key pressed."""
    run = RunFolder(tmp_path / "live")
    run.check_writable()
    run.write_config("steps = 10\n")
    with viewing(run.path) as port:
        page.goto(f"http://127.0.0.1:{port}/runs/live")
        assert "Nothing measured yet" in page.locator("#waiting").inner_text()
        add_steps(run, 1, 3)
        length = f"() => document.querySelector('{REWARD} .plot')?.data?.[0].x.length"
        page.wait_for_function(f"() => ({length})() === 3")
        add_steps(run, 4, 6)
        page.wait_for_function(f"() => ({length})() === 6")
        assert page.locator("#state").inner_text().startswith("Step 6 of 10")
        assert page.locator("#last-step").inner_text() == "last step: 6"
        assert page.locator("#events tbody tr").count() == 2
        run.rewind(2)
        page.wait_for_function(f"() => ({length})() === 2")
        page.locator("#events tbody tr").first.wait_for(state="detached")


def test_half_written_and_older_runs(page: Page, tmp_path: Path) -> None:
    """A run that died in the middle of a line, and one of an older groupwise: what there is."""
    torn = make_run(tmp_path / "torn", 3)
    with torn.metrics.open("a") as lines:
        lines.write('{"step": 4, "rewa')
    torn.rollout(3).write_bytes(torn.rollout(3).read_bytes()[:200])
    old = make_run(tmp_path / "old", 1)
    table = pq.read_table(old.rollout(1)).drop_columns(["entropy", "reward_parts", "draw"])
    pq.write_table(table.replace_schema_metadata({rollouts.VERSION_KEY: b"0"}), old.rollout(1))
    with viewing(tmp_path) as port:
        base = f"http://127.0.0.1:{port}/runs"
        page.goto(f"{base}/torn")
        page.locator(f"{REWARD} path.js-line").first.wait_for(state="attached")
        assert page.locator("#state").inner_text().startswith("Step 3 of 10")
        page.goto(f"{base}/torn/step/3")
        assert "can't be shown" in page.locator("h1").inner_text()
        page.goto(f"{base}/torn/prompt/100")
        assert page.locator("#draws tbody tr").count() == 2
        page.goto(f"{base}/old/step/1/group/0/sample/0")
        page.locator("#heat span").first.wait_for()
        assert "older groupwise" in page.locator(".note").inner_text()
        assert "entropy" not in page.locator("#stream").inner_text()


ATTACKS = {
    "tags": "<script>window.hit=1</script><img src=x onerror=window.hit=1></pre>"
    "<svg onload=window.hit=1><iframe srcdoc='<script>parent.hit=1</script>'></iframe>"
    "<a href=javascript:window.hit=1>x</a>",
    "template": "{{ 7*7 }}{% raw %}${window.hit=1}`",
    "control": "a\x00b\x1b[2Jc\x07d\r\n\te\x7f\x9b",
    "direction": "שלום \u202eevil\u202c \u2066x \u200f עולם",
    "emoji": "👩‍👩‍👧‍👦 ﷽ Z͑ͫ̓ͪ̂ͫ̽͏̴̙̤̞͉͚̯̞̠͍A̴̵̜̰͔ͫ͗͢L̠ͨͧͩ͘G̴̻͈͍͔̹̑͗̎̅",
}


def test_hostile_completions_stay_text(page: Page, tmp_path: Path) -> None:
    run = make_run(tmp_path / "bad", 1)
    rows = []
    for group, text in enumerate(ATTACKS.values()):
        prompt = f"<|im_start|>user\n{text}<|im_end|>\n"
        rows.append(sample(group, 0, text, prompt_text=prompt, grader_reason=text, answer=text,
                           grader_status=text, reward_parts={text: 1.0}))  # fmt: skip
        run.add_events([Event(1, "health", text, {"rule": text}), Event(1, text, text)])
    rollouts.write(run.rollout(1), rows, 1)
    run.add_metrics('{"step": 2, "reward/part/<img src=x onerror=hit=1>": 1, "reward/mean": 1}')
    # A tokenizer that has the completions' characters: tokens are hostile text as well.
    for file, data in character_files(ALPHABET + "".join(ATTACKS.values())).items():
        (run.checkpoints / "step_1" / file).write_bytes(data)

    def check(path: str) -> None:
        assert page.evaluate("window.hit") is None, path
        assert page.locator("main iframe, main img, main script, main svg[onload]").count() == 0
        assert page.locator("a[href^=javascript]").count() == 0
        shown = page.locator("main").inner_text()
        assert not re.search("[\x00-\x08\x0e-\x1f\u202a-\u202e\u2066-\u2069]", shown), path

    with viewing(run.path) as port:
        base = f"http://127.0.0.1:{port}/runs/bad"
        page.goto(base)
        page.locator(".chart path.js-line").first.wait_for(state="attached")
        page.locator("#events tbody tr").nth(9).wait_for()
        page.locator("#charts summary:visible").nth(1).click()  # the hostile metric's own chart
        page.locator(".chart").first.focus()
        page.keyboard.press("ArrowRight")
        assert "onerror=window.hit" in page.locator(".said").first.inner_text()
        check("the run")
        page.goto(f"{base}/step/1")
        check("the step")
        for group in range(len(ATTACKS)):
            for path in (f"/step/1/group/{group}", f"/prompt/{100 + group}"):
                page.goto(base + path)
                check(path)
            page.goto(f"{base}/step/1/group/{group}/sample/0")
            page.locator("#heat span").first.wait_for()
            check(f"sample of {group}")


def test_a_line_of_a_megabyte(page: Page, tmp_path: Path) -> None:
    """Shown in part, at once; all of it as plain text."""
    run = make_run(tmp_path / "long", 1)
    long = "x" * 1_000_000
    rollouts.write(run.rollout(1), [sample(0, 0, long), sample(0, 1)], 1)
    with viewing(run.path) as port:
        base = f"http://127.0.0.1:{port}/runs/long/step/1/group/0"
        page.goto(base)
        assert "998,805 characters more" in page.locator(".card").last.inner_text()
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        page.goto(f"{base}/sample/0")
        page.locator("#heat span").first.wait_for()
        assert page.locator("#heat span").count() == 2048
        page.get_by_role("button", name="later tokens").click()
        page.wait_for_function(
            "() => document.getElementById('token-note').textContent.includes('2049')"
        )
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        page.get_by_role("link", name="all of it").click()
        page.wait_for_url("**/text")
        page.wait_for_function("() => document.body?.textContent.length > 1_000_000")


SKIPPED = """all => all.filter((x, at) => at && x.tagName[1] - all[at - 1].tagName[1] > 1)
    .map(x => x.innerText)"""
NAMELESS = """all => all.filter(x => x.type !== "hidden" && !x.labels?.length && !x.ariaLabel
    && !(x.tagName === "BUTTON" && x.textContent.trim())).map(x => x.outerHTML)"""
KINDS = {
    "home": "/",
    "run": "/runs/one",
    "two runs": "/compare?run=one&run=two",
    "step": "/runs/one/step/1",
    "group": "/runs/one/step/1/group/0",
    "sample": "/runs/one/step/1/group/0/sample/0",
    "prompt": "/runs/one/prompt/100",
    "search": "/runs/one/search?q=number",
    "trouble": "/nowhere",
}


@pytest.mark.parametrize("width", [390, 820, 1440])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_page_is_dark_fits_and_leaves_the_console_empty(
    kind: str, width: int, browser: Any, tmp_path: Path
) -> None:
    """No page is wider than the screen, no column so narrow that words fall apart; headings leave
    out no level, and what can be operated has a name.
    """
    make_run(tmp_path / "one", 3)
    make_run(tmp_path / "two", 3, config="steps = 10\noptim.learning_rate = 1e-4\n")
    for arm in ("grpo_gate.high=0.3", "rloo"):
        make_run(tmp_path / "sweep/runs" / arm / "seed_0", 1)
    (tmp_path / "sweep/plan.json").write_text("{}")
    context = browser.new_context(color_scheme="dark", viewport={"width": width, "height": 800})
    context.set_default_timeout(WAIT)
    page, said = context.new_page(), []
    page.on("console", lambda each: said.append(each.text) if is_trouble(each) else None)
    page.on("pageerror", lambda error: said.append(str(error)))
    with viewing(tmp_path) as port:
        page.goto(f"http://127.0.0.1:{port}{KINDS[kind]}")
        if kind in ("run", "two runs"):
            page.locator(".chart path.js-line").last.wait_for(state="attached")
        if kind == "sample":
            page.locator("#heat span").first.wait_for()
        colour = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert colour == "rgb(15, 19, 24)"
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        # Words of a table's cell: of more than one line, yet not of a few letters each.
        narrow = page.locator("td").evaluate_all(
            "all => all.filter(x => x.innerText.trim().length > 12 && x.clientWidth < 60)"
            ".map(x => x.innerText)"
        )
        assert narrow == []
        assert page.locator("h1, h2, h3").evaluate_all(SKIPPED) == []
        assert (
            page.locator("input, select, textarea, button, progress, meter").evaluate_all(NAMELESS)
            == []
        )
    context.close()
    assert said == []


def test_the_policy_stops_what_escaping_would_miss(browser: Any, tmp_path: Path) -> None:
    """A script put into the page by hand, as if a template had let it through, does not run."""
    run = make_run(tmp_path / "one", 1)
    page = browser.new_page()
    with viewing(run.path) as port:
        page.goto(f"http://127.0.0.1:{port}/runs/one/step/1", timeout=WAIT)
        with page.expect_console_message(lambda said: "script-src" in said.text, timeout=WAIT):
            page.evaluate(
                """() => {
              const made = document.createElement("img");
              made.setAttribute("onerror", "window.hit = 1");
              made.src = "data:,";
              document.body.append(made);
            }"""
            )
        assert page.evaluate("window.hit") is None
    page.close()
