"""One server's HTTP: a request and its whole answer within a deadline, or why there is none."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import socket
import threading
import time
from typing import Any
from urllib.parse import urlsplit

from groupwise.errors import EngineError

SAID = 300  # characters of a server's own words that are shown
MOST = 2**28  # bytes of an answer


class ServerGone(EngineError):
    """A server that was not reached, hangs or broke off: what it had to do can be done again."""


class ServerFailed(ServerGone):
    """A server that answers, and says that it failed, or answers what can't be."""


class ServerRefused(EngineError):
    """A request that the server won't serve, whoever sends it again."""

    def __init__(self, text: str, status: int) -> None:
        super().__init__(text)
        self.status = status


class PendingCall:
    """A request on its way, which another thread may break off."""

    def __init__(self) -> None:
        self._socket: socket.socket | None = None
        self._lock, self.over = threading.Lock(), False

    def begin(self, connected: socket.socket) -> None:
        with self._lock:
            self._socket = connected
            if self.over:
                self._close()

    def end(self) -> None:
        """Break it off: a server stops writing for a client that has left."""
        with self._lock:
            self.over = True
            self._close()

    def _close(self) -> None:
        if self._socket is not None:
            with contextlib.suppress(OSError):  # it was closed already
                self._socket.shutdown(socket.SHUT_RDWR)


class Link:
    """The address of a server. A key, if it wants one, is read from the environment."""

    def __init__(self, url: str, key_variable: str) -> None:
        self.url, self.key_variable = url.rstrip("/"), key_variable
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise EngineError(
                f"engine.urls names {url!r}, which is no address of a server. Write it as "
                '"http://127.0.0.1:8000".'
            )
        self._secure, self._path = parts.scheme == "https", parts.path
        self._host, self._port = parts.hostname, parts.port

    def get(self, path: str, *, seconds: float, doing: str) -> Any:
        return self._ask("GET", path, None, seconds, doing, None)

    def post(
        self,
        path: str,
        body: Any = None,
        *,
        seconds: float,
        doing: str,
        call: PendingCall | None = None,
    ) -> Any:
        return self._ask("POST", path, body, seconds, doing, call)

    def _ask(
        self,
        method: str,
        path: str,
        body: Any,
        seconds: float,
        doing: str,
        call: PendingCall | None,
    ) -> Any:
        kind = http.client.HTTPSConnection if self._secure else http.client.HTTPConnection
        # One connection a request: a server that closed an idle one looks like one that died.
        connection = kind(self._host, self._port, timeout=seconds)
        try:
            status, data = self._talk(connection, method, path, body, seconds, call)
        except TimeoutError:
            raise ServerGone(
                f"{self.url} gave no answer within {seconds:g} s while {doing}"
            ) from None
        except (OSError, http.client.HTTPException) as error:
            why = str(error) or type(error).__name__
            raise ServerGone(f"{self.url} can't be reached while {doing}: {why}") from None
        finally:
            connection.close()
        if status >= 400:
            said = data.decode("utf-8", "replace")[:SAID]
            text = f"{self.url} answers {status} while {doing}: {said}"
            if status >= 500 or status in (408, 429):
                raise ServerFailed(text)
            raise ServerRefused(text, status)
        return self._read(data, doing)

    def _talk(
        self,
        connection: http.client.HTTPConnection,
        method: str,
        path: str,
        body: Any,
        seconds: float,
        call: PendingCall | None,
    ) -> tuple[int, bytes]:
        deadline = time.monotonic() + seconds
        headers = {"Connection": "close"}
        if key := os.environ.get(self.key_variable, "").strip():
            headers["Authorization"] = f"Bearer {key}"
        data = None if body is None else json.dumps(body).encode()
        if data is not None:
            headers["Content-Type"] = "application/json"
        connection.connect()
        if call is not None:
            call.begin(connection.sock)
        connection.request(method, self._path + path, data, headers)
        answer = connection.getresponse()
        found = bytearray()
        while part := answer.read1(2**16):
            found += part
            if time.monotonic() > deadline:
                raise TimeoutError
            if len(found) > MOST:
                raise http.client.HTTPException(f"its answer has more than {MOST} bytes")
        missing = answer.length
        if missing:
            raise http.client.IncompleteRead(bytes(found), missing)
        return answer.status, bytes(found)

    def _read(self, data: bytes, doing: str) -> Any:
        if not data.strip():
            return None
        try:
            return json.loads(data)
        except (ValueError, RecursionError):
            if len(data) < SAID:
                return data.decode("utf-8", "replace")  # some calls say a word
            raise ServerFailed(f"{self.url} answers what is no JSON while {doing}") from None
