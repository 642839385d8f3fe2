"""The viewer without a browser: what is read, what is shown, who may ask."""

from __future__ import annotations

import importlib.util
import json
import math
import re
import shutil
import socket
import struct
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import quote

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from viewing import add_steps, get, make_run, metrics_of, rows_of, sample, viewing

from groupwise.cli import main
from groupwise.common.extras import install
from groupwise.errors import ConfigError, RunError
from groupwise.records import Turn
from groupwise.runfiles import rollouts
from groupwise.runfiles.files import append_lines, write_atomic
from groupwise.runfiles.folder import RunFolder
from groupwise.runfiles.partial import PartialReader
from groupwise.runfiles.rollouts import Row
from groupwise.runfiles.starts import Start, write_starts
from groupwise.view import chat, render, server
from groupwise.view.prompts import PromptIndex
from groupwise.view.runs import GrowingFile, Runs, ViewedRun
from groupwise.view.steps import OF_GROUPS, found_in, groups_of
from groupwise.view.tokens import PAGE, pieces, token_page, tokenizer_of
from groupwise.watch.plots import write_plots
from groupwise.watch.report import report_page

HOSTILE = (
    "</pre></textarea></title><script>window.hit=1</script><img src=x onerror=window.hit=1>"
    "<svg/onload=window.hit=1>{{7*7}}\x00\x1b[31m\u202eevil\u2066 ' \" javascript:alert(1)"
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return make_run(tmp_path_factory.mktemp("runs") / "one")


@pytest.fixture(scope="module")
def port(run: RunFolder) -> Iterator[int]:
    with viewing(run.path) as number:
        yield number


def words(page: str) -> str:
    """The text of a page as a reader sees it, and proof that no tag came with it."""
    parser = Text()
    parser.feed(page)
    return " ".join(" ".join(parser.words).split())


class Text(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.words: list[str] = []

    def handle_data(self, data: str) -> None:
        self.words.append(data)


# --- files that grow ----------------------------------------------------------------------------


def test_only_new_lines_are_read_and_a_torn_one_later(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    growing = GrowingFile(path)
    assert growing.news() == (False, [])
    path.write_bytes(b'{"step": 1}\n{"step": 2, "a"')
    assert growing.news() == (False, [{"step": 1}])
    assert growing.news() == (False, [])
    with path.open("ab") as file:
        file.write(b': 3}\n{"step": 3}\n')
    assert growing.news() == (False, [{"step": 2, "a": 3}, {"step": 3}])


def test_a_rewound_file_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    append_lines(path, ['{"step": 1}', '{"step": 2}'])
    growing = GrowingFile(path)
    growing.news()
    write_atomic(path, '{"step": 1}\n{"step": 2, "anew": 1}\n')  # longer, and yet another file
    assert growing.news() == (True, [{"step": 1}, {"step": 2, "anew": 1}])
    path.write_bytes(b'{"step": 7}\n')
    assert growing.news() == (True, [{"step": 7}])
    path.unlink()
    assert growing.news() == (True, [])


def test_columns_have_gaps_where_nothing_was_measured(run: RunFolder) -> None:
    seen = ViewedRun(run.path, "one")
    seen.refresh()
    assert [p.step for p in seen.points("entropy/mean")] == [1, 2, 4, 5, 6, 7, 8, 9, 10]
    assert [(p.step, p.value, p.error) for p in seen.points("eval/accuracy")] == [
        (5, 0.5, 0.1),
        (10, 0.5, 0.1),
    ]
    assert {len(column) for column in seen.columns.values()} == {10}
    assert "weights/fingerprint" not in seen.columns
    assert seen.points("groups/useful_share")[0].value == 0.75
    assert seen.points("nothing") == []
    before = seen.version()
    seen.refresh()
    assert seen.version() == before


# --- groups -------------------------------------------------------------------------------------


def test_groups_are_measured_by_hand(run: RunFolder) -> None:
    table, version = rollouts.read_older(run.rollout(2), OF_GROUPS)
    assert version == rollouts.VERSION
    half, fail, good, broken, dropped = groups_of(table)
    assert (half.mean, half.spread) == (0.5, 0.5)
    assert half.marks == ["right", "right", "wrong", "wrong"]
    assert half.length == (2 + 2 + 5 + 5) / 4
    assert broken.rewards == [None, 1.0, 2.0, 3.0] and broken.mean == 2.0
    assert math.isclose(broken.spread, math.sqrt(2 / 3))
    assert broken.marks[0] == "open"
    fits = {
        name: [g.number for g in (half, fail, good, broken, dropped) if g.fits(name)]
        for name in ("fail", "pass", "mixed", "truncated", "error", "dropped")
    }
    assert fits == {
        "fail": [1, 4],
        "pass": [2, 3],
        "mixed": [0, 3],
        "truncated": [1],
        "error": [3],
        "dropped": [4],
    }


def test_the_greedy_completion_counts_for_nothing(tmp_path: Path) -> None:
    path = tmp_path / "step_1.parquet"
    rollouts.write(path, [sample(0, -1, "7", finish="length"), sample(0, 0), sample(0, 1)], 1)
    (group,) = groups_of(rollouts.read_older(path, OF_GROUPS)[0])
    assert (group.mean, group.spread, group.truncated) == (1.0, 0.0, 0)


def test_search_looks_in_prompts_completions_and_reasons(run: RunFolder) -> None:
    path = run.rollout(2)
    assert found_in(path, "FIVE") == {0}
    assert found_in(path, "please (3)") == {3}
    assert found_in(path, "BOOM") == {3}
    assert found_in(path, "at step 2") == {2}
    assert found_in(path, ".*") == set()  # words, not a pattern


def test_one_prompt_across_the_steps(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", 3)
    index = PromptIndex(ViewedRun(folder.path, "run"))
    assert index.steps(102) == [1, 2, 3] and index.steps(999) == []
    draws = index.draws(102, PartialReader())
    assert [step for step, _, _ in draws] == [3, 2, 1]
    assert draws[0][2] == "4 at step 3<end>" and draws[0][1].prompt_id == 102
    rollouts.write(folder.rollout(2), [sample(9, 0)], 2)  # a resumed run writes it anew
    assert index.steps(102) == [1, 3] and index.steps(109) == [2]


# --- tokens -------------------------------------------------------------------------------------


def test_every_number_of_every_token(run: RunFolder) -> None:
    page = token_page(run.rollout(1), 0, 2, 0, tokenizer_of(run))
    assert page["pieces"] == ["f", "i", "v", "e", "<end>"]
    streams = {stream["name"]: stream for stream in page["streams"]}
    assert streams["sampler_logp"]["values"] == [-0.25, -0.5, -0.75, -1.0, -1.25]
    assert streams["sampler_logp"]["reach"] == 1.25
    assert streams["mismatch"]["values"] == [0.5] * 5
    assert streams["clipped"]["values"] == [0, 1, 0, 0, 0]
    assert math.isclose(streams["ratio"]["reach"], math.log(1.25))
    assert streams["advantage"]["values"] == [-1.5] * 5
    assert {"learner_logp", "ref_logp", "entropy", "coefficient", "mask"} <= streams.keys()


def test_what_was_not_computed_is_left_out(run: RunFolder) -> None:
    page = token_page(run.rollout(1), 4, 0, 0, tokenizer_of(run))
    assert [stream["name"] for stream in page["streams"]] == ["sampler_logp", "mask"]


def test_a_long_completion_comes_in_pages_with_one_scale(tmp_path: Path) -> None:
    path = tmp_path / "step_1.parquet"
    text = "ab" * PAGE
    rollouts.write(path, [sample(0, 0, text)], 1)
    first, last = (token_page(path, 0, 0, start, None) for start in (0, 2 * PAGE))
    assert (len(first["ids"]), first["count"]) == (PAGE, 2 * PAGE + 1)
    assert (len(last["ids"]), last["start"]) == (1, 2 * PAGE)
    reach = [page["streams"][0]["reach"] for page in (first, last)]
    assert reach[0] == reach[1] == (2 * PAGE + 1) / 4
    assert not first["named"] and first["pieces"][0] == f"⟨{first['ids'][0]}⟩"


def test_a_character_in_several_tokens_stands_at_its_last() -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    ids = backend.encode("aé→b").ids
    assert len(ids) == 7
    assert pieces(ids, backend) == ["a", "", "é", "", "", "→", "b"]
    assert pieces([10**6], backend) == ["⟨1000000⟩"]


# --- chat ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "prompt",
    [
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi\n<|im_end|>\n"
        "<|im_start|>assistant\n",
        "<|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|><|start_header_id|>user"
        "<|end_header_id|>\n\nHi\n<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
        "<|system|>\nBe brief.<|end|>\n<|user|>\nHi\n<|end|>\n<|assistant|>\n",
    ],
)
def test_turns_of_the_usual_templates(prompt: str) -> None:
    assert chat.turns(prompt) == [("system", "Be brief."), ("user", "Hi\n")]


def test_other_turns() -> None:
    assert chat.turns("7+5=") == [("", "7+5=")]
    assert chat.turns("<s>[INST] Hi [/INST]") == [("", "<s>"), ("user", "Hi ")]
    gemma = "<bos><start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\n"
    assert chat.turns(gemma) == [("", "<bos>"), ("user", "Hi")]
    begun = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>\n"
    assert chat.turns(begun)[-1] == ("assistant", "<think>\n")
    assert chat.thought_and_answer("<think>hm</think>4") == ("hm", "4")
    assert chat.thought_and_answer("<think>hm") == ("", "<think>hm")


# --- pages --------------------------------------------------------------------------------------


def test_every_page_from_the_runs_to_the_token(port: int) -> None:
    paths = {
        "/": "one",
        "/runs/one": "Step 10",
        "/runs/one/step/2": "5 of 5 groups",
        "/runs/one/step/2/group/0": "What is 2+2, please (0)?",
        "/runs/one/step/2/group/0/sample/2": "another number",
        "/runs/one/prompt/102": "10 times",
        "/runs/one/search?q=at+step+7": "4 samples in 10 steps",
        "/runs/one/step/2/group/0/sample/2/text": "five<end>",
    }
    for path, expected in paths.items():
        status, page, headers = get(port, path)
        shown = page if path.endswith("/text") else words(page)
        assert status == 200 and expected in shown, path
        policy = headers["content-security-policy"]
        assert "default-src 'none'; script-src 'self'; style-src 'self';" in policy
        assert "unsafe" not in policy and headers["x-content-type-options"] == "nosniff"
        assert not re.search(r"<script(?! src=\"/assets/)|\son\w+=|style=\"", page), path


def test_groups_come_by_spread_and_filters_narrow_them(port: int) -> None:
    def shown(query: str) -> list[int]:
        page = get(port, f"/runs/one/step/2{query}")[1]
        return [int(n) for n in re.findall(r'/step/2/group/(\d+)"', page)]

    assert shown("") == [3, 0, 1, 2, 4]
    assert shown("?sort=number") == [0, 1, 2, 3, 4]
    assert shown("?only=fail") == [1, 4]
    assert shown("?only=truncated") == [1] and shown("?only=error") == [3]
    assert shown("?search=five") == [0]
    assert shown("?search=five&only=error") == []
    assert shown("?page=99") == [3, 0, 1, 2, 4] and shown("?only=nonsense&sort=x") == shown("")


def test_curves_as_data_and_nothing_when_nothing_is_new(port: int) -> None:
    address = "/runs/one/trends.json?name=reward/mean&name=eval/accuracy&name=none"
    data = json.loads(get(port, address)[1])
    assert data["curves"]["reward/mean"]["step"] == list(range(1, 11))
    assert data["curves"]["reward/mean"]["value"][3] == 0.2
    assert data["curves"]["eval/accuracy"]["error"] == [0.1, 0.1]
    assert data["curves"]["none"]["step"] == []
    kinds = [(event["step"], event["kind"], event["health"]) for event in data["events"]]
    assert kinds == [(4, "health", True), (6, "refill", False)]
    assert get(port, f"{address}&known={data['version']}")[0] == 204


def test_the_picture_shows_where_a_rule_fired(port: int) -> None:
    page = get(port, "/runs/one")[1]
    picture = page[page.index('data-name="reward/mean"') :]
    line = re.search(r'class="event" d="M([\d.]+) ', picture[: picture.index("</svg>")])
    assert line and float(line[1]) == pytest.approx(46 + 304 * 3 / 9, abs=0.1)  # step 4 of 1 to 10


@pytest.mark.parametrize(
    "path",
    [
        "/nothing",
        "/runs/two",
        "/runs/one/step/99",
        "/runs/one/step/x",
        "/runs/one/step/2/group/77",
        "/runs/one/step/2/group/0/sample/9",
        "/runs/one/step/2/group/0/sample/9/text",
        "/runs/one/step/2/group/0/sample/9/tokens",
        "/runs/one/prompt/5",
        "/runs/one/step/" + "9" * 400,
        "/runs/%2e%2e/step/1",
        "/assets/..%2fserver.py",
        "/assets/../../pages.py",
        "/runs/one/step/2/group/0/sample/0/more/1",
    ],
)
def test_what_is_not_there_is_said(port: int, path: str) -> None:
    status, page, _ = get(port, path)
    assert status == 404 and "Traceback" not in page


def test_process_rewards_stand_beside_their_pieces(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", 1)
    steps = [(4, 0.25), (4, -1.0), (9, 0.5)]
    rollouts.write(folder.rollout(1), [sample(0, 0, "one two three", reward_steps=steps)], 1)
    with viewing(folder.path) as port:
        page = get(port, "/runs/run/step/1/group/0/sample/0")[1]
    table = page[page.index('id="process"') :].partition("</table>")[0]
    assert "0.25 one -1 0.5 two t" in words(table)


def test_names_and_methods_that_are_refused(port: int) -> None:
    for host in ("127.0.0.1:1234", "localhost", "[::1]:80", "LOCALHOST:80"):
        assert get(port, "/", host)[0] == 200, host
    for host in ("evil.example", "127.0.0.1.evil.example", "localhost.evil.example:80", ""):
        assert get(port, "/", host)[0] == 421, host
    assert get(port, "/", method="PUT")[0] == 501
    assert get(port, "/", method="POST")[0] == 403


def test_hostile_text_is_only_text(tmp_path: Path) -> None:
    name = 'a"><script>window.hit=1<.script> & b'
    folder = RunFolder(tmp_path / name)
    folder.check_writable()
    folder.write_config("steps = 1\n# " + "</pre><script>x</script>\n")
    rows = [
        sample(0, i, HOSTILE, prompt_text=HOSTILE, grader_reason=HOSTILE, answer=HOSTILE,
               grader_status=HOSTILE, finish=HOSTILE, weights=HOSTILE,
               reward_parts={HOSTILE: 1.0})
        for i in range(2)
    ]  # fmt: skip
    rollouts.write(folder.rollout(1), rows, 1)
    folder.add_metrics(json.dumps({"step": 1, "reward/part/" + HOSTILE: 1.0, "reward/mean": 1.0}))
    with viewing(tmp_path) as port:
        base = "/runs/" + quote(name, safe="")
        pages = ["/", base, *(base + path for path in (
            "/step/1", "/step/1?search=" + quote(HOSTILE, safe=""), "/step/1/group/0",
            "/step/1/group/0/sample/0", "/prompt/100"))]  # fmt: skip
        for path in pages:
            status, page, _ = get(port, path)
            assert status == 200, path
            assert not re.search(r"<(img|svg/)|<script(?! src=\"/assets/)", page), path
            page = re.sub('data-name="[^"]*"', "", page)  # not seen, and asked for as it is
            assert not re.search("[\x00-\x08\x1b\u202a-\u202e\u2066-\u2069]", page), path
        plain = get(port, f"{base}/step/1/group/0/sample/0/text")
        assert plain[2]["content-type"].startswith("text/plain") and "<script>" in plain[1]


# --- odd runs -----------------------------------------------------------------------------------


def test_empty_and_half_written_runs(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with viewing(tmp_path / "empty") as port:
        assert "No runs yet" in words(get(port, "/")[1])
    begun = RunFolder(tmp_path / "begun")
    begun.check_writable()
    with viewing(tmp_path / "begun") as port:
        assert "Nothing measured yet" in words(get(port, "/runs/begun")[1])
        begun.metrics.write_text('{"step": 0, "eval/accuracy": 0.25}\n{"step": 1, "rewa')
        begun.rollout(1).write_bytes(b"PAR1 half of a file")
        (begun.rollouts / ".step_2.parquet.partial").write_bytes(b"x")
        assert "Step 0" in words(get(port, "/runs/begun")[1])
        status, page, _ = get(port, "/runs/begun/step/1")
        assert status == 404 and "not a Parquet file" in words(page)
        assert get(port, "/runs/begun/prompt/1")[0] == 404
        begun.summary.write_text("{")  # a page in trouble does not end the others
        assert "is not JSON" in words(get(port, "/")[1])
    shutil.rmtree(begun.path)


def without(path: Path, names: set[str], version: bytes | None) -> None:
    """The same file as an older groupwise would have written it."""
    table = pq.read_table(path)
    table = table.select([name for name in table.column_names if name not in names])
    meta = {} if version is None else {rollouts.VERSION_KEY: version}
    pq.write_table(table.replace_schema_metadata(meta), path)


def test_an_older_schema_is_shown_without_what_it_lacks(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "old", 2)
    without(folder.rollout(1), {"entropy", "used", "grader_reason", "reward_parts", "draw"}, b"0")
    without(folder.rollout(2), {"token_ids", "text", "clipped", "advantage"}, None)
    with viewing(folder.path) as port:
        for step in (1, 2):
            for path in ("", "/group/0", "/group/0/sample/0", "/group/0/sample/0/tokens"):
                status, page, _ = get(port, f"/runs/old/step/{step}{path}")
                assert status == 200
                assert "older groupwise" in page or path.endswith("tokens")
        names = [s["name"] for s in json.loads(page_of(port, 1))["streams"]]
        assert "entropy" not in names and "ratio" in names
        assert json.loads(page_of(port, 2))["count"] == 0
        assert "2 times" in words(get(port, "/runs/old/prompt/100")[1])


def test_what_others_wrote_is_shown_apart(tmp_path: Path) -> None:
    """Under its role, grey, without a number, and in no length; roles are text like any other."""
    folder = make_run(tmp_path / "old", 1)
    role = "tool<script>"
    own = [True] * 2 + [False] * 3 + [True] * 2
    turns = (Turn("assistant", 0, 2), Turn(role, 2, 5), Turn("assistant", 5, 7))
    rows = [
        sample(0, 0, "4?7+1=8", mask=[*own, False], turns=(*turns, Turn("user", 7, 8))),
        sample(0, 1, "4 is four", correct=True),
    ]
    rollouts.write(folder.rollout(1), rows, 1)
    with viewing(folder.path) as port:
        page = get(port, "/runs/old/step/1/group/0/sample/0")[1]
        shown = words(page)
        assert "assistant 4? tool<script> not the policy 7+1 assistant =8 user" in shown
        assert page.count('class="turn foreign"') == 2
        assert "tokens 4 tokens of others 4" in shown
        assert "not the policy" not in get(port, "/runs/old/step/1/group/0/sample/1")[1]
        group = words(get(port, "/runs/old/step/1/group/0")[1])
        assert "4 tokens · 4 of others" in group and "10 tokens" in group
        data = json.loads(page_of(port, 1))
    assert data["foreign"] == [not x for x in own] + [True]
    assert [turn["role"] for turn in data["turns"]] == ["assistant", role, "assistant", "user"]
    for stream in data["streams"]:
        if stream["name"] == "mask":
            assert stream["values"] == [*map(float, own), 0.0]
        else:
            assert [x is None for x in stream["values"]] == data["foreign"]
    # The largest entropy and log-probability of the policy's: the scale is not the tool's.
    reach = {stream["name"]: stream["reach"] for stream in data["streams"]}
    assert reach["sampler_logp"] == 7 / 4
    table, _ = rollouts.read_older(folder.rollout(1), OF_GROUPS)
    assert groups_of(table)[0].lengths == [4, 10]
    script = get_asset("tokens.js")
    assert "page.foreign[at]" in script and "#heat span.foreign" in get_asset("tokens.css")


def get_asset(name: str) -> str:
    return (Path(server.__file__).parent / "assets" / name).read_text()


def test_a_file_from_before_there_were_turns_is_shown_as_one(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "old", 1)
    without(folder.rollout(1), {"turns"}, b"1")
    with viewing(folder.path) as port:
        data = json.loads(page_of(port, 1))
        assert data["turns"] == [{"role": "assistant", "start": 0, "end": 2}]
        assert data["foreign"] == [False, False]
        assert "not the policy" not in get(port, "/runs/old/step/1/group/0/sample/0")[1]


def page_of(port: int, step: int) -> str:
    return get(port, f"/runs/old/step/{step}/group/0/sample/0/tokens")[1]


def test_a_newer_schema_is_refused_in_words(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "new", 1)
    without(folder.rollout(1), set(), b"99")
    with pytest.raises(RunError, match="schema 99, this groupwise reads 1"):
        rollouts.read_older(folder.rollout(1), OF_GROUPS)
    with viewing(folder.path) as port:
        assert "schema 99" in words(get(port, "/runs/new/step/1")[1])


def test_a_resumed_run_forgets_what_was_dropped(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", 6)
    with viewing(folder.path) as port:
        address = "/runs/run/trends.json?name=reward/mean"
        assert json.loads(get(port, address)[1])["curves"]["reward/mean"]["step"][-1] == 6
        folder.rewind(3)
        data = json.loads(get(port, address)[1])
        assert data["curves"]["reward/mean"]["step"] == [1, 2, 3] and data["events"] == []
        add_steps(folder, 4, 5)
        data = json.loads(get(port, address)[1])
        assert data["curves"]["reward/mean"]["step"] == [1, 2, 3, 4, 5] and data["last"] == 5


def test_two_runs_and_what_differs(tmp_path: Path) -> None:
    make_run(tmp_path / "a", 2, 'steps = 10\n[recipe]\nname = "grpo"\n')
    make_run(tmp_path / "b", 2, 'steps = 10\ngroup_size = 3\n[recipe]\nname = "grpo"\n')
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "metrics.jsonl").write_text("")
    with viewing(tmp_path) as port:
        page = words(get(port, "/compare?run=a&run=b")[1])
        assert re.search(r"group_size \d+ 3", page) and "steps 10" not in page
        assert "no config.toml" in words(get(port, "/compare?run=a&run=c")[1])
        assert get(port, "/compare?run=a")[0] == 400
        assert get(port, "/compare?run=a&run=zzz")[0] == 400


def test_runs_of_one_name_and_runs_that_start_later(tmp_path: Path) -> None:
    for place in ("x", "y"):
        make_run(tmp_path / place / "demo", 1)
    runs = Runs([tmp_path / "x", tmp_path / "y" / "demo"])
    assert list(runs.all()) == ["demo", "demo (2)"]
    make_run(tmp_path / "x" / "later", 1)
    assert list(runs.all()) == ["demo", "demo (2)", "later"]
    shutil.rmtree(tmp_path / "x" / "later")
    assert list(runs.all()) == ["demo", "demo (2)"]


def test_runs_of_a_comparison_are_found_and_named_by_it(tmp_path: Path) -> None:
    for arm in ("grpo", "rloo"):
        make_run(tmp_path / "compare/two/runs" / arm / "seed_0", 1)
    make_run(tmp_path / "demo", 1)
    make_run(tmp_path / "old/demo", 1)
    (tmp_path / "compare/two/plan.json").write_text("{}")
    arms = ["compare/two/grpo/seed_0", "compare/two/rloo/seed_0"]
    assert list(Runs([tmp_path]).all()) == [*arms, "demo", "old/demo"]
    within = tmp_path / "compare/two"
    assert list(Runs([within]).all()) == ["two/grpo/seed_0", "two/rloo/seed_0"]
    alone = [within / "runs" / arm / "seed_0" for arm in ("grpo", "rloo")]
    assert list(Runs(alone).all()) == ["grpo/seed_0", "rloo/seed_0"]
    with viewing(tmp_path) as port:
        page = get(port, "/")[1]
        assert page.index(">demo</a>") < page.index("<h2>Comparison compare/two</h2>")
        assert ">grpo/seed_0</a>" in page and ">rloo/seed_0</a>" in page
        for name in ("compare%2Ftwo%2Fgrpo%2Fseed_0", "old%2Fdemo"):
            assert f'href="/runs/{name}"' in page
            for path in ("", "/step/1", "/step/1/group/0", "/step/1/group/0/sample/0"):
                assert get(port, f"/runs/{name}{path}")[0] == 200, path
        both = "&".join(f"run={arm.replace('/', '%2F')}" for arm in arms)
        assert get(port, f"/compare?{both}")[0] == 200
    assert "<h1>two/grpo/seed_0</h1>" in report_page(RunFolder(alone[0]))


def test_what_was_changed_on_the_way_is_shown(tmp_path: Path) -> None:
    for name in ("one", "two"):
        run = make_run(tmp_path / name, 2, config="steps = 10\n")
        changed = ({"what": "optim.learning_rate", "old": 1e-3, "new": "<b>"},)
        write_starts(run, [Start(0, "", {}), Start(1, "", {}, changed=changed[: name == "one"])])
    words = "from step 2 on: optim.learning_rate: 0.001 -&gt; &#34;&lt;b&gt;&#34;"
    with viewing(tmp_path) as port:
        assert words in get(port, "/runs/one")[1]
        assert "Changed on the way" not in get(port, "/runs/two")[1]
        assert words in get(port, "/compare?run=one&run=two")[1]


# --- the command and the report -----------------------------------------------------------------


def test_wrong_requests(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["view", str(tmp_path / "none")]) == 2
    assert "There is no folder" in capsys.readouterr().err
    assert main(["view", str(tmp_path), "--port", "99999"]) == 2
    assert "--port 0" in capsys.readouterr().err
    monkeypatch.setattr(render, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install .*plotly"):
        server.Viewer(Runs([tmp_path]), ("127.0.0.1", 0))


def test_a_browser_that_hangs_up_is_nothing_to_show(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Before it asks, or while a page is sent: no traceback on the screen of who looks."""
    make_run(tmp_path / "one", 2)
    with server.Viewer(Runs([tmp_path]), ("127.0.0.1", 0)) as viewer:
        for request in (b"", b"GET / HTTP/1.1\r\n"):
            caller = socket.create_connection(viewer.server_address[:2])
            caller.sendall(request)
            hang_up = struct.pack("ii", 1, 0)  # at once, so that the other side sees a reset
            caller.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, hang_up)
            taken, address = viewer.get_request()
            caller.close()
            viewer.process_request_thread(taken, address)
    assert capfd.readouterr().err == ""


def test_a_report_with_plots(
    run: RunFolder, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["report", str(run.path)]) == 0
    page = run.report.read_text("utf-8")
    assert page.count('class="event"') == 5  # accuracy begins after the step
    assert "entropy collapse" in page and "Dotted: a health rule fired." in page
    plots = sorted(path.name for path in (run.path / "plots").iterdir())
    assert plots == ["entropy_in_nats.png", "held_out_accuracy.png", "length_in_tokens.png",
                     "sampler_learner_mismatch_in_nats.png", "training_reward.png",
                     "useful_groups.png"]  # fmt: skip
    data = (run.path / "plots" / "training_reward.png").read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    write_plots(run.path)
    assert (run.path / "plots" / "training_reward.png").read_bytes() == data  # nothing of the clock
    real = importlib.util.find_spec
    monkeypatch.setattr(
        "groupwise.watch.plots.find_spec", lambda name: None if name == "matplotlib" else real(name)
    )
    capsys.readouterr()
    assert main(["report", str(run.path)]) == 0
    assert install("view") in capsys.readouterr().err


def test_made_rows_and_metrics_are_what_the_tests_think() -> None:
    assert len(rows_of(1)) == 20 and metrics_of(3)["entropy/mean"] is None
    assert pa.types.is_list(rollouts.to_table(rows_of(1), 1).schema.field("ratio").type)


def test_the_tokens_of_a_run_with_a_critic_have_its_values(tmp_path: Path) -> None:
    given = Row(1, 0, 0, 0, (1,), (2, 3), [0.0, 0.0], value=[0.25, -0.5], return_=[1.0, 0.0],
                process_reward=[0.0, 0.125])  # fmt: skip
    rollouts.write(tmp_path / "a.parquet", [given, replace(given, sample=1, value=None)], 1)
    page = token_page(tmp_path / "a.parquet", 0, 0, 0, None)
    shown = {stream["name"]: stream for stream in page["streams"]}
    assert shown["value"]["values"] == [0.25, -0.5] and shown["value"]["reach"] == 0.5
    assert shown["return"]["values"] == [1.0, 0.0]
    assert shown["process_reward"]["values"] == [0.0, 0.125]
    assert shown["value"]["title"] == "critic's value before the token"
    other = token_page(tmp_path / "a.parquet", 0, 1, 0, None)
    assert "value" not in [stream["name"] for stream in other["streams"]]
