"""Who may ask the server of a model, for how much, and how long a client may take."""

from __future__ import annotations

import http.client
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import engine_zoo as zoo
import pytest

from groupwise.commands import serve
from groupwise.common import callers
from groupwise.engine import server as served
from groupwise.engine.server import Handler, Server
from groupwise.errors import ConfigError, RewardError
from groupwise.graders.endpoint import Endpoint

CHAT = "/v1/chat/completions"


@contextmanager
def serving(host: str = "127.0.0.1", key: str = "") -> Iterator[Server]:
    engine = zoo.engine()
    engine.tokenizer.template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    shape = engine.source.model.config
    with Server(engine, engine.tokenizer, shape, "tiny", (host, 0), key) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture(scope="module")
def alone() -> Iterator[Server]:
    with serving() as server:
        yield server


@pytest.fixture(scope="module")
def open_to_all() -> Iterator[Server]:
    with serving("0.0.0.0") as server:
        yield server


def body(**options: Any) -> bytes:
    messages = [{"role": "user", "content": "abc"}]
    return json.dumps({"messages": messages, "max_tokens": 4, "seed": 1, **options}).encode()


def ask(
    server: Server, path: str = CHAT, data: bytes | None = None, **headers: str
) -> tuple[int, dict[str, Any]]:
    """Status and answer; GET where a path of its own is given."""
    connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=30)
    method = "POST" if path == CHAT else "GET"
    connection.request(method, path, (data or body()) if path == CHAT else None, headers)
    answer = connection.getresponse()
    found = json.loads(answer.read())
    connection.close()
    return answer.status, found


def why(found: dict[str, Any]) -> str:
    assert set(found) == {"error"}
    return str(found["error"]["message"])


# --- names and pages ----------------------------------------------------------------------------


@pytest.mark.parametrize("path", [CHAT, "/v1/models"])
def test_a_name_that_somebody_made_point_here_is_refused(alone: Server, path: str) -> None:
    for host in ("evil.example", "evil.example:8000", "127.0.0.1.evil.example", "[::1", ""):
        status, found = ask(alone, path, Host=host)
        assert status == 421 and "name" in why(found), host
    for host in ("127.0.0.1", "localhost:1", "[::1]:8000", "LOCALHOST"):
        assert ask(alone, path, Host=host)[0] == 200, host


@pytest.mark.parametrize("path", [CHAT, "/v1/models"])
def test_pages_of_other_sites_are_refused(alone: Server, path: str) -> None:
    host = "localhost:8000"
    for origin in ("https://evil.example", "null", "http://localhost:3000", "http://[", ""):
        status, found = ask(alone, path, Host=host, Origin=origin)
        assert status == 403 and "page" in why(found), origin
    assert ask(alone, path, Host=host, Origin="http://localhost:8000")[0] == 200


# --- the key ------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [CHAT, "/v1/models", "/nowhere"])
def test_beyond_this_machine_a_key_is_needed(open_to_all: Server, path: str) -> None:
    key = open_to_all.key
    assert len(key) >= 32
    for given in ({}, {"Authorization": key}, {"Authorization": f"Bearer {key}x"},
                  {"Authorization": "Bearer "}, {"Authorization": f"Basic {key}"}):  # fmt: skip
        status, found = ask(open_to_all, path, **given)
        assert status == 401 and "key" in why(found)
    sound = {"Authorization": f"Bearer {key}", "Host": "any.name.of.the.cluster"}
    assert ask(open_to_all, path, **sound)[0] == (404 if path == "/nowhere" else 200)
    assert ask(open_to_all, path, **sound, Origin="https://evil.example")[0] == 403


def test_a_key_that_was_set_holds_on_this_machine_too(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(key="mine") as server:
        url = f"http://127.0.0.1:{server.server_address[1]}/v1"
        request = json.loads(body())
        monkeypatch.delenv("OPENAI_API_KEY", raising=False)
        (refused,) = Endpoint(url, "tiny", retries=0).replies([request])
        assert isinstance(refused, RewardError) and "401" in str(refused)
        monkeypatch.setenv("OPENAI_API_KEY", "mine")
        (answered,) = Endpoint(url, "tiny", retries=0).replies([request])
        assert isinstance(answered, str)


def test_no_key_is_made_for_this_machine_alone(alone: Server) -> None:
    assert alone.key == ""


def test_the_key_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(serve.KEY, " abc\n")
    assert serve._key() == "abc"
    monkeypatch.setenv(serve.KEY, "a\nb")
    with pytest.raises(ConfigError, match="no header"):
        serve._key()


@pytest.mark.parametrize(
    "address, is_alone",
    [("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("localhost", True),
     ("0.0.0.0", False), ("::", False), ("192.168.0.4", False), ("", False)],
)  # fmt: skip
def test_what_only_this_machine_reaches(address: str, is_alone: bool) -> None:
    assert callers.is_loopback(address) == is_alone


# --- how much -----------------------------------------------------------------------------------


def test_a_long_request_is_refused_before_it_is_read(
    alone: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = alone.engine.source.model.config.context
    assert alone.max_body == served.BYTES_PER_TOKEN * context + served.BYTES_BESIDE
    monkeypatch.setattr(alone.engine.tokenizer, "prompt", lambda messages: pytest.fail("read"))
    status, found = ask(alone, data=b" " * (10 * 2**20))
    assert status == 413 and f"{alone.max_body:,} bytes" in why(found)
    with socket.create_connection(alone.server_address[:2], timeout=30) as client:
        client.sendall(b"POST " + CHAT.encode() + b" HTTP/1.1\r\nContent-Length: 9999999\r\n\r\n")
        assert b" 413 " in client.recv(1000)  # with no byte of the body sent


def test_more_tokens_than_one_may_have(alone: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused before the prompt is read: that may take long."""
    monkeypatch.setattr(alone.engine.tokenizer, "prompt", lambda messages: pytest.fail("read"))
    most = served.MAX_TOKENS
    for options in ({"max_tokens": most + 1}, {"n": 64, "max_tokens": most // 64 + 1},
                    {"max_completion_tokens": 10**12}):  # fmt: skip
        status, found = ask(alone, data=body(**options))
        assert status == 400 and f"{most:,}" in why(found)
    status, found = ask(alone, data=body(stop=["x"] * 17))
    assert status == 400 and "stop" in why(found)


@pytest.mark.parametrize(
    "head",
    [
        b"".join(b"X-%d: %s\r\n" % (i, b"y" * 9000) for i in range(90)),  # 800 kB in sound lines
        b"".join(b"X-%d: y\r\n" % i for i in range(500)),
        b"X: " + b"y" * 100_000 + b"\r\n",
    ],
)
def test_a_long_head_is_refused(alone: Server, head: bytes, capfd: Any) -> None:
    with socket.create_connection(alone.server_address[:2], timeout=30) as client:
        data = b""
        try:
            client.sendall(b"GET /v1/models HTTP/1.1\r\n" + head + b"\r\n")
            data = client.recv(1000)
        except ConnectionError:  # cut off while it was still sending
            data = data or b" 431 "
        assert b" 431 " in data
    assert ask(alone)[0] == 200 and capfd.readouterr().err == ""


def test_errors_of_the_library_look_like_ours(alone: Server) -> None:
    with socket.create_connection(alone.server_address[:2], timeout=30) as client:
        client.sendall(b"BREW /v1/models HTTP/1.1\r\n\r\n")
        client.shutdown(socket.SHUT_WR)
        head, _, rest = b"".join(iter(lambda: client.recv(4096), b"")).partition(b"\r\n\r\n")
    assert b" 501 " in head and "BREW" in why(json.loads(rest))


def test_too_many_at_once_are_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving() as server:
        server.places = threading.Semaphore(1)
        begun, go_on = threading.Event(), threading.Event()
        sampled = server.engine.generate

        def held(*args: Any) -> Any:
            begun.set()
            go_on.wait(30)
            return sampled(*args)

        monkeypatch.setattr(server.engine, "generate", held)
        first: list[int] = []
        asking = threading.Thread(target=lambda: first.append(ask(server)[0]))
        asking.start()
        assert begun.wait(30)
        status, found = ask(server)
        assert status == 503 and "waiting" in why(found)
        assert ask(server, "/v1/models")[0] == 200
        go_on.set()
        asking.join()
        assert first == [200] and ask(server)[0] == 200


def test_connections_beyond_the_limit_are_closed() -> None:
    with serving() as server:
        server.connections = threading.Semaphore(1)
        address = server.server_address[:2]
        with socket.create_connection(address, timeout=30) as first:
            first.sendall(b"GET /v1/models HTTP/1.1\r\n\r\n")
            assert b" 200 " in first.recv(1000)
            with socket.create_connection(address, timeout=30) as second:
                assert second.recv(10) == b""


# --- how long -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "start, more",
    [
        (b"GET /v1/mo", b"x"),  # a byte now and then, for ever
        (b"GET /v1/models HTTP/1.1\r\n", b"X: y\r\n"),
        (b"POST " + CHAT.encode() + b" HTTP/1.1\r\nContent-Length: 50000\r\n\r\n", b" "),
        (b"", b""),
    ],
)
def test_a_slow_client_is_let_go(
    start: bytes, more: bytes, alone: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Handler, "patience", 0.2)
    with socket.create_connection(alone.server_address[:2], timeout=0.02) as client:
        client.sendall(start)
        for _ in range(1000):  # 20 seconds at least: until the server hangs up
            try:
                client.sendall(more)
                if not client.recv(1000):
                    break
            except TimeoutError:
                continue
            except ConnectionError:
                break
        else:
            pytest.fail("the server goes on waiting")
    monkeypatch.undo()
    assert ask(alone)[0] == 200
