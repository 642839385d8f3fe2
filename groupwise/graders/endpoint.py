"""Chat completions from an endpoint that speaks OpenAI's protocol: retried, limited and cached."""

from __future__ import annotations

import functools
import hashlib
import http.client
import json
import os
import random
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from groupwise.errors import RewardError
from groupwise.runfiles.files import write_atomic

REFUSED = {400, 413, 422}  # statuses that say that the request itself can't be served
AGAIN = {408, 409, 425, 429, 500, 502, 503, 504}  # statuses that a second try may mend
LONGEST_WAIT = 60.0
MAX_REPLY = 4 * 2**20  # bytes
MAX_WORDS = 500  # characters that are shown of what went wrong


class EndpointError(RewardError):
    """A request that got no answer, and why."""


class RefusedError(EndpointError):
    """A request that can't be served as it is, perhaps because it is too long."""


@dataclass
class RateLimit:
    """A rate limit: requests start at least so far apart, whichever thread sends them."""

    per_minute: float  # 0: as fast as they come
    next_start: float = 0.0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def wait(self) -> None:
        if not self.per_minute:
            return
        with self.lock:
            start = max(self.next_start, time.monotonic())
            self.next_start = start + 60.0 / self.per_minute
        time.sleep(max(start - time.monotonic(), 0.0))


@functools.cache
def _rate_limit(url: str, per_minute: float) -> RateLimit:
    """Return the one limit of all that use this address."""
    return RateLimit(per_minute)


@dataclass(frozen=True)
class Endpoint:
    """The address where a model answers. The key is read from an environment variable, never a
    file.
    """

    url: str  # http://127.0.0.1:8000/v1
    model: str
    key_variable: str = "OPENAI_API_KEY"
    concurrency: int = 16
    per_minute: float = 0.0
    retries: int = 5
    timeout: float = 120.0
    cache: str = ""  # a folder: what was answered once is not asked again
    whole: bool = False  # a reply that max_tokens cut off is none

    def replies(self, bodies: Sequence[Mapping[str, Any]]) -> list[str | EndpointError]:
        """Return a text for each request, in order, or why there is none."""
        if not bodies:
            return []
        with ThreadPoolExecutor(min(self.concurrency, len(bodies))) as threads:
            return list(threads.map(self._reply, bodies))

    def _reply(self, body: Mapping[str, Any]) -> str | EndpointError:
        whole = {"model": self.model, **body}
        kept = self._place(whole)
        if kept is not None and (known := _cached_reply(kept)) is not None:
            return known
        try:
            reply = self._ask(whole)
        except EndpointError as error:
            return error
        if kept is not None:
            kept.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(kept, json.dumps({"request": whole, "reply": reply}))
        return reply

    def _place(self, body: Mapping[str, Any]) -> Path | None:
        if not self.cache:
            return None
        text = json.dumps([self.url, body], sort_keys=True)
        return Path(self.cache).expanduser() / f"{hashlib.sha256(text.encode()).hexdigest()}.json"

    def _ask(self, body: Mapping[str, Any]) -> str:
        why, kind = "", EndpointError
        for attempt in range(self.retries + 1):
            if attempt:
                time.sleep(_backoff(attempt))
            _rate_limit(self.url, self.per_minute).wait()
            try:
                return self._post(body)
            except EndpointError as error:  # another try would end like this one
                why = str(error)
                break
            except urllib.error.HTTPError as error:
                why = f"{error.code} {error.reason}: {_said(error)}"
                if error.code not in AGAIN:
                    kind = RefusedError if error.code in REFUSED else EndpointError
                    break
                asked = error.headers.get("Retry-After", "")
                if asked.isdecimal():
                    time.sleep(min(float(asked), LONGEST_WAIT))
            except (
                OSError,
                http.client.HTTPException,
                ValueError,
                LookupError,
                TypeError,
            ) as error:
                why = f"{type(error).__name__}: {error}"
        key = self._key()
        shown = why.replace(key, "***") if key else why
        raise kind(f"{self.url} did not answer: {shown[:MAX_WORDS]}")

    def _key(self) -> str:
        return os.environ.get(self.key_variable, "").strip()  # read from a file, it may end a line

    def _post(self, body: Mapping[str, Any]) -> str:
        headers = {"Content-Type": "application/json"}
        if key := self._key():
            if not (key.isascii() and key.isprintable()):  # the error of a header would show it
                raise EndpointError(f"the key in {self.key_variable} has characters that none has")
            headers["Authorization"] = f"Bearer {key}"
        request = urllib.request.Request(
            f"{self.url.rstrip('/')}/chat/completions", json.dumps(body).encode(), headers
        )
        deadline = time.monotonic() + self.timeout
        data = bytearray()
        with OPENER.open(request, timeout=self.timeout) as answer:
            while part := answer.read1(65536):
                data += part
                if len(data) > MAX_REPLY:
                    raise EndpointError(f"the reply has more than {MAX_REPLY} bytes")
                if time.monotonic() > deadline:
                    raise TimeoutError(f"no whole reply within {self.timeout:g} s")
        choice = _read(data)["choices"][0]
        content = choice["message"]["content"]
        if self.whole and choice.get("finish_reason") == "length":
            raise EndpointError("the reply is cut off: raise max_tokens")
        if not isinstance(content, str):
            raise ValueError("the reply has no text")
        return content


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """A handler that follows no redirect: the key would go along."""

    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        return None


OPENER = urllib.request.build_opener(_NoRedirects)


def _cached_reply(kept: Path) -> str | None:
    """Return the cached reply; None where there is none, or a full disk cut it off."""
    try:
        found = _read(kept.read_bytes())["reply"]
    except (OSError, ValueError, LookupError, TypeError):
        return None
    return found if isinstance(found, str) else None


def _read(data: bytes | bytearray) -> Any:
    try:
        return json.loads(data)
    except RecursionError:
        raise ValueError("the reply has too many brackets within each other") from None


def _said(error: urllib.error.HTTPError) -> str:
    try:
        return error.read(2000).decode("utf-8", "replace")[:200]
    except (OSError, http.client.HTTPException):
        return ""


def _backoff(attempt: int) -> float:
    """Return the seconds to wait: twice as long each time, randomised so that clients do not
    collide.
    """
    return min(0.5 * 2.0 ** (attempt - 1), LONGEST_WAIT) * (0.5 + random.random() / 2)
