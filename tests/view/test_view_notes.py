"""Tags and notes: the one thing that the viewer writes, and who may make it do so."""

from __future__ import annotations

import http.client
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from viewing import get, make_run, viewing

from groupwise.errors import RunError
from groupwise.runfiles.folder import RunFolder
from groupwise.view.notes import Notes, read_notes, write_notes
from groupwise.view.runs import Runs
from groupwise.view.server import Viewer

ASKED = {"tags": ["long", " two  words "], "note": "<b>best</b> so far"}


def post(
    port: int, body: bytes, headers: Mapping[str, str], path: str = "/runs/one/notes"
) -> tuple[int, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    connection.request("POST", path, body, dict(headers))
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, json.loads(text) if text.startswith("{") else text


def allowed(port: int) -> dict[str, str]:
    """As a page of the server's own sends them."""
    token = re.search(r'data-token="([^"]+)"', get(port, "/runs/one")[1])
    assert token
    return {
        "Host": f"127.0.0.1:{port}",
        "Origin": f"http://127.0.0.1:{port}",
        "Content-Type": "application/json",
        "X-Groupwise-Token": token[1],
    }


def test_tags_and_a_note_are_written_and_shown(tmp_path: Path) -> None:
    run = make_run(tmp_path / "one", 1)
    with viewing(tmp_path) as port:
        status, found = post(port, json.dumps(ASKED).encode(), allowed(port))
        assert (status, found["tags"]) == (200, ["long", "two words"])
        for path in ("/", "/runs/one"):
            page = get(port, path)[1]
            assert ">two words</span>" in page and "&lt;b&gt;best&lt;/b&gt; so far" in page
    assert read_notes(run) == Notes(("long", "two words"), "<b>best</b> so far")
    assert sorted(p.name for p in run.path.glob("notes*")) == ["notes.json"]


@pytest.mark.parametrize(
    "change",
    [
        {"X-Groupwise-Token": "guessed"},
        {"X-Groupwise-Token": "gue\xdfed"},
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Content-Type": "text/plain"},
        {"Content-Type": "application/x-www-form-urlencoded"},
    ],
    ids=lambda change: " ".join(f"{k}={v!a}" for k, v in change.items()),
)
def test_nobody_else_writes(tmp_path: Path, change: dict[str, str]) -> None:
    run = make_run(tmp_path / "one", 1)
    with viewing(tmp_path) as port:
        headers = allowed(port) | change
        assert post(port, json.dumps(ASKED).encode(), headers)[0] == 403
        missing = {k: v for k, v in allowed(port).items() if k not in change}
        assert post(port, json.dumps(ASKED).encode(), missing)[0] == 403
        rebound = allowed(port) | {"Host": "evil.example", "Origin": "http://evil.example"}
        assert post(port, json.dumps(ASKED).encode(), rebound)[0] == 421
    assert not (run.path / "notes.json").exists()


def test_what_is_no_note_is_refused(tmp_path: Path) -> None:
    run = make_run(tmp_path / "one", 1)
    with viewing(tmp_path) as port:
        headers = allowed(port)
        for body in (b"{", b"[]", b'{"tags": "x"}', b'{"note": 3}',
                     json.dumps({"tags": ["x" * 41]}).encode(),
                     json.dumps({"tags": [str(n) for n in range(21)]}).encode(),
                     json.dumps({"note": "x" * 4001}).encode()):  # fmt: skip
            status, found = post(port, body, headers)
            assert status == 400 and found["error"], body
        assert post(port, b"{}", headers, "/runs/two/notes")[0] == 404
        assert post(port, b"{}", headers, "/runs/one/config.toml")[0] == 404
        huge = headers | {"Content-Length": str(10**9)}
        assert post(port, b"x", huge)[0] == 413
    assert not (run.path / "notes.json").exists()


def test_a_server_that_others_reach_writes_nothing(tmp_path: Path) -> None:
    make_run(tmp_path / "one", 1)
    server = Viewer(Runs([tmp_path]), ("0.0.0.0", 0))
    try:
        assert server.token == ""
        assert b"notes-form" not in server.answer("/runs/one").body
    finally:
        server.server_close()
    with Viewer(Runs([tmp_path]), ("127.0.0.1", 0)) as other:
        assert b"notes-form" in other.answer("/runs/one").body


def test_a_link_is_neither_followed_nor_written_through(tmp_path: Path) -> None:
    run, secret = make_run(tmp_path / "one", 1), tmp_path / "secret.json"
    secret.write_text('{"note": "mine"}')
    (run.path / "notes.json").symlink_to(secret)
    with pytest.raises(RunError):
        read_notes(run)
    with viewing(tmp_path) as port:
        page = get(port, "/runs/one")[1]
        assert "mine" not in page and "Damaged files" in page
    write_notes(RunFolder(run.path), ASKED)
    assert secret.read_text() == '{"note": "mine"}' and read_notes(run).note == ASKED["note"]
