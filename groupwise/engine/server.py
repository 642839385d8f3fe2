"""A small OpenAI-compatible server of the native engine: chat completions, on this machine.

Requests that wait while others are being answered are answered together.
"""

from __future__ import annotations

import json
import queue
import secrets
import threading
import time
import zlib
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from groupwise.engine.native import NativeEngine
from groupwise.engine.protocol import Request, Sampling
from groupwise.errors import GroupwiseError
from groupwise.graders.answers import without_ends
from groupwise.records import Completion

MAX_BODY = 16 * 2**20
DEFAULT_TOKENS = 256
FINISH = {"eos": "stop", "stop": "stop", "length": "length"}


class BadRequest(ValueError):
    """What a client asked for and can't get."""


@dataclass(frozen=True)
class Asked:
    prompt: tuple[int, ...]
    samples: int
    seed: int
    sampling: Sampling
    answer: Future[list[Completion]] = field(default_factory=Future)

    @property
    def key(self) -> tuple[int, int]:
        """Names the randomness: the same request gets the same answer, in any company."""
        return zlib.crc32(repr(self.prompt).encode()), self.seed


class Server(ThreadingHTTPServer):
    """`serve_forever()` as usual; `shutdown()` ends it."""

    daemon_threads = True

    def __init__(self, engine: NativeEngine, name: str, address: tuple[str, int]) -> None:
        super().__init__(address, Handler)
        self.engine, self.name = engine, name
        self.waiting: queue.Queue[Asked] = queue.Queue()
        threading.Thread(target=self._answer_all, daemon=True).start()

    def read(self, body: Mapping[str, Any]) -> Asked:
        messages = body.get("messages")
        if not isinstance(messages, list) or not messages:
            raise BadRequest("messages must be a list of messages")
        if body.get("stream"):
            raise BadRequest("stream is not offered: ask without it")
        stop = body.get("stop") or ()
        try:
            sampling = Sampling(
                max_tokens=int(
                    body.get("max_completion_tokens") or body.get("max_tokens") or DEFAULT_TOKENS
                ),
                temperature=float(body.get("temperature", 1.0)),
                top_p=float(body.get("top_p", 1.0)),
                stop=(stop,) if isinstance(stop, str) else tuple(stop),
            )
            prompt = tuple(self.engine.tokenizer.prompt(messages))
            samples, seed = int(body.get("n") or 1), body.get("seed")
            seed = secrets.randbits(31) if seed is None else int(seed)
        except (GroupwiseError, TypeError, ValueError) as error:
            raise BadRequest(str(error)) from error
        if samples < 1 or seed < 0:
            raise BadRequest("n must be at least 1, and seed at least 0")
        return Asked(prompt, samples, seed, sampling)

    def _answer_all(self) -> None:
        while True:
            asked = [self.waiting.get()]
            while not self.waiting.empty():
                asked.append(self.waiting.get())
            while asked:
                # Requests of one key are one another's repetition: they take turns.
                turn = {
                    one.key: one for one in reversed(asked) if one.sampling == asked[0].sampling
                }
                self._answer(list(turn.values()), asked[0].sampling)
                asked = [one for one in asked if turn.get(one.key) is not one]

    def _answer(self, asked: Sequence[Asked], sampling: Sampling) -> None:
        requests = [Request(one.prompt, one.samples, *one.key, "probe") for one in asked]
        try:
            for one, found in zip(asked, self.engine.generate(requests, sampling), strict=True):
                one.answer.set_result(found)
        except Exception as error:  # the boundary to the clients
            for one in asked:
                if not one.answer.done():
                    one.answer.set_exception(error)

    def reply(self, asked: Asked, found: Sequence[Completion]) -> dict[str, Any]:
        ends = [self.engine.tokenizer.decode([token]) for token in self.engine.tokenizer.eos_ids]
        ends += asked.sampling.stop
        texts = self.engine.tokenizer.decode_all([one.token_ids for one in found])
        written = sum(len(one.token_ids) for one in found)
        return {
            "id": f"chatcmpl-{time.time_ns():x}",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": self.name,
            "choices": [
                {
                    "index": index,
                    "message": {"role": "assistant", "content": without_ends(text, ends)},
                    "finish_reason": FINISH[one.finish],
                }
                for index, (one, text) in enumerate(zip(found, texts, strict=True))
            ],
            "usage": {
                "prompt_tokens": len(asked.prompt),
                "completion_tokens": written,
                "total_tokens": len(asked.prompt) + written,
            },
        }


class Handler(BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        if self.path.rstrip("/") == "/v1/models":
            model = {"id": self.server.name, "object": "model", "owned_by": "groupwise"}
            self._send(200, {"object": "list", "data": [model]})
        else:
            self._refuse(404, f"no {self.path} here; POST to /v1/chat/completions")

    def do_POST(self) -> None:
        length = self.headers.get("Content-Length", "")
        if not length.isdigit() or int(length) > MAX_BODY:
            self.close_connection = True
            return self._refuse(413, "the request has no length, or is too long")
        data = self.rfile.read(int(length))
        if self.path.rstrip("/") != "/v1/chat/completions":
            return self._refuse(404, f"no {self.path} here; POST to /v1/chat/completions")
        try:
            body = json.loads(data)
            if not isinstance(body, dict):
                raise BadRequest("the request is no JSON object")
            asked = self.server.read(body)
        except (BadRequest, ValueError, RecursionError) as error:
            return self._refuse(400, str(error))
        self.server.waiting.put(asked)
        try:
            found = asked.answer.result()
        except GroupwiseError as error:
            return self._refuse(400, str(error))
        except Exception as error:
            return self._refuse(500, f"{type(error).__name__}: {error}")
        self._send(200, self.server.reply(asked, found))

    def _refuse(self, status: int, why: str) -> None:
        self._send(status, {"error": {"message": why, "type": "invalid_request_error"}})

    def _send(self, status: int, content: Mapping[str, Any]) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet: a judge asks thousands of times."""
