"""A stand-in for vLLM's and SGLang's servers, written from their protocols: with every fault.

It is a real HTTP server on loopback, and a tiny model of the package computes behind it, so its
log-probabilities are right unless it is told to lie. What it knows of the real ones' ways: weights
are read from a folder or handed over in chunks; what is computed for a prompt outlives an update
unless it is cleared or salted; a paused server lets requests wait; a seed names a sample.
"""

from __future__ import annotations

import base64
import contextlib
import copy
import json
import pickle
import socket
import threading
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch
from torch import Tensor

from groupwise.engine.native.copies import round_trip
from groupwise.model.adapters import lora, peft_files
from groupwise.model.formats.checkpoint import assemble, load_weights
from groupwise.model.layers.attention import packed, packed_positions
from groupwise.model.layers.linear import layer_sizes
from groupwise.model.layers.transformer import Transformer

HANDED: dict[str, Tensor] = {}  # tensors that a test hands over as if by CUDA IPC, by name
COMPLETION_FIELDS = ("return_token_ids", "prompt_logprobs", "logprobs", "seed", "stop_token_ids",
                     "cache_salt")  # fmt: skip
VLLM = ("/v1/completions", "/v1/models", "/pause", "/resume", "/reset_prefix_cache",
        "/collective_rpc", "/init_weight_transfer_engine", "/start_weight_update",
        "/update_weights", "/finish_weight_update", "/update_weight_version", "/weight_info",
        "/get_world_size")  # fmt: skip
SGLANG = ("/generate", "/update_weights_from_disk", "/pause_generation", "/continue_generation",
          "/flush_cache", "/get_model_info", "/update_weight_version")  # fmt: skip


class Refused(Exception):
    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class FakeServer:
    """One server. `faults` are switched on by name: for ever (True), or for so many times."""

    def __init__(self, folder: Path, kind: str = "vllm", context: int = 128, port: int = 0) -> None:
        self.folder, self.kind, self.context = folder, kind, context
        self.faults: Counter[str] = Counter()
        self.without: set[str] = set()  # calls and fields that this version has not
        self.adapters = False
        self.calls: list[tuple[str, Any]] = []
        self.port = port
        self.lock = threading.RLock()
        self.http: Any = None
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Serve the folder that it was made with, as a supervisor starts it again."""
        self.model = load_weights(self.folder, torch.float32)
        assert isinstance(self.model, Transformer)
        self.version = "default"
        self.adapted: dict[str, Transformer] = {}
        self.cache: dict[Any, Transformer] = {}
        self.pending: dict[str, Tensor] | None = None
        self.running = threading.Event()
        self.running.set()
        self.released = threading.Event()
        self.busy = self.peak = 0
        self.sockets: set[socket.socket] = set()
        self.http = _Http(("127.0.0.1", self.port), self)
        self.port = self.http.server_address[1]
        threading.Thread(target=self.http.serve_forever, args=(0.01,), daemon=True).start()

    def stop(self) -> None:
        """Die: whoever waits for an answer gets none."""
        self.released.set()
        self.running.set()
        dead, self.http = self.http, None
        dead.shutdown()
        dead.server_close()
        for held in list(self.sockets):
            with contextlib.suppress(OSError):
                held.shutdown(socket.SHUT_RDWR)

    def restart(self) -> None:
        self.stop()
        self.start()

    def has(self, fault: str) -> bool:
        """Tell whether a fault happens now; one that is counted happens once less."""
        with self.lock:
            left = self.faults[fault]
            if left and left is not True:
                self.faults[fault] -= 1
            return bool(left)

    def paths(self) -> list[str]:
        known = list(VLLM if self.kind == "vllm" else SGLANG)
        if self.adapters and self.kind == "vllm":
            known.append("/v1/load_lora_adapter")
        elif self.adapters:
            known += ["/load_lora_adapter", "/unload_lora_adapter"]
        return [path for path in known if path not in self.without]

    def asked(self, path: str) -> list[Any]:
        return [body for called, body in self.calls if called == path]

    # --- what it computes ---

    def logits(self, model: Transformer, ids: list[int]) -> Tensor:
        with self.lock, torch.no_grad():
            token_T = torch.tensor(ids)
            hidden_TD = model(token_T, packed_positions([len(ids)]), packed([len(ids)]))
            return hidden_TD.float() @ model.head_weight.float().T

    def model_for(self, prompt: list[int], salt: str, name: str) -> Transformer:
        """Return who computes: of a prompt that is cached, whoever did when it was."""
        with self.lock:
            now = self.adapted.get(name, self.model)
            return self.cache.setdefault((tuple(prompt), salt, name), now)

    def sample(self, asked: dict[str, Any]) -> tuple[list[int], list[float], str]:
        prompt, ends = asked["prompt"], asked["ends"]
        model = self.model_for(prompt, asked["salt"], asked["model"])
        generator = torch.Generator().manual_seed(asked["seed"] % 2**63)
        draws = torch.rand(asked["most"], generator=generator)
        raw, ids, logps, finish = self.faults["raw"], [], [], "length"
        for draw in draws:
            logits_V = self.logits(model, [*prompt, *ids])[-1]
            cold = asked["temperature"] or 1.0
            hot_V = logits_V / cold
            if len(ids) < asked["least"]:
                hot_V[ends] = -torch.inf
            chances_V = hot_V.softmax(-1)
            token = int((chances_V.cumsum(-1) < draw).sum().clamp(max=len(chances_V) - 1))
            if not asked["temperature"]:
                token = int(hot_V.argmax())
            ids.append(token)
            logps.append(float((logits_V if raw else hot_V).log_softmax(-1)[token]))
            if token in ends:
                finish = "stop"
                break
        return ids, logps, finish

    def spoiled(
        self, ids: list[int], logps: list[Any], finish: str
    ) -> tuple[list[int], list[Any], str]:
        """An answer as a broken server gives it."""
        if self.has("short") and len(ids) > 1:
            ids, logps, finish = ids[:1], logps[:1], "length"
        if self.has("empty"):
            ids, logps, finish = [], [], "stop"
        if self.has("abort"):
            finish = "abort"
        if self.has("nan"):
            logps = [float("nan"), *logps[1:]]
        if self.has("lengths"):
            logps = logps[:-1]
        if self.has("no_logps"):
            logps = [None] * len(logps)
        if self.has("beyond"):
            ids = [10**6, *ids[1:]]
        return ids, logps, finish

    def write(self, asked: dict[str, Any]) -> tuple[list[int], list[Any], str]:
        vocabulary = self.model.config.vocab_size
        if max(asked["prompt"]) >= vocabulary:
            raise Refused(400, f"Token id {max(asked['prompt'])} is out of vocabulary")
        if len(asked["prompt"]) + asked["most"] > self.context:
            raise Refused(400, f"This model's maximum context length is {self.context} tokens")
        with self.lock:
            self.busy += 1
            self.peak = max(self.peak, self.busy)
        try:
            self.running.wait(30)  # a paused server lets requests wait
            if asked["most"] == 1:  # a question about the server, which faults leave alone
                return self.sample(asked)
            if self.has("die"):
                raise ConnectionAbortedError
            if self.has("hang"):
                self.released.wait(30)
            if self.has("fail"):
                raise Refused(500, "EngineDeadError")
            return self.spoiled(*self.sample(asked))
        finally:
            with self.lock:
                self.busy -= 1

    def score(self, ids: list[int], salt: str, name: str) -> list[float]:
        if max(ids) >= self.model.config.vocab_size:
            raise Refused(400, f"Token id {max(ids)} is out of vocabulary")
        self.running.wait(30)
        model = self.model_for(ids[:1], salt, name)
        logp_TV = self.logits(model, ids).log_softmax(-1)
        found = [float(logp_TV[at, token]) for at, token in enumerate(ids[1:])]
        return [float("nan")] * len(found) if self.has("nan_score") else found

    # --- weights ---

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Take weights as a checkpoint has them, or as little of them as a fault lets through."""
        if self.has("load_fails"):
            raise Refused(500, "weights can't be read")
        before = self.model.state_dict()
        if self.faults["stale"]:
            tensors = before
        if self.faults["tied_head"]:  # the embedding moves, what is packed for the head does not
            tensors = tensors | {"lm_head.weight": self.model.head_weight.detach()}
        if self.faults["half"]:
            names = sorted(tensors)
            old = {name: before[name] for name in names[len(names) // 2 :] if name in before}
            tensors = tensors | old
        if self.faults["rounds"]:
            tensors = {k: round_trip(x) if x.dim() > 1 else x for k, x in tensors.items()}
        shape = copy.copy(self.model.config)
        if "lm_head.weight" in tensors:
            object.__setattr__(shape, "tied", False)
        self.model = assemble(shape, tensors.items())

    def load_folder(self, place: str) -> None:
        model = load_weights(Path(place), torch.float32)
        self.load(dict(model.state_dict()))

    def load_adapter(self, name: str, place: str) -> None:
        model = copy.deepcopy(self.model)
        stored = peft_files.read(place, layer_sizes(model))
        lora.attach(model, stored.spec, seed=0, names=list(stored.tensors))
        lora.fill(model, stored.named())
        if not self.faults["stale"] or name not in self.adapted:
            self.adapted[name] = model

    def clear(self) -> None:
        if not self.faults["keeps_cache"]:
            self.cache.clear()

    def said_version(self) -> str:
        return "another" if self.faults["lies"] else self.version

    # --- calls ---

    def answer(self, path: str, query: str, body: Any) -> Any:
        if path == "/openapi.json":
            fields = [name for name in COMPLETION_FIELDS if name not in self.without]
            schema = {"CompletionRequest": {"properties": {name: {} for name in fields}}}
            update = {"post": {"requestBody": {}} if "older" in self.faults else {}}
            paths = {name: update if "start" in name else {} for name in self.paths()}
            return {"paths": paths, "components": {"schemas": schema}}
        if path not in self.paths():
            raise Refused(404, "Not Found")
        return (self._vllm if self.kind == "vllm" else self._sglang)(path, query, body)

    def _vllm(self, path: str, query: str, body: Any) -> Any:
        if path == "/v1/models":
            return {"data": [{"id": "policy", "parent": None, "max_model_len": self.context}]}
        if path == "/v1/completions":
            return self._completion(body)
        if path == "/pause":
            self.running.clear()
            if "clear_cache=true" in query:
                self.clear()
        elif path == "/resume":
            self.running.set()
        elif path == "/reset_prefix_cache":
            self.clear()
            return {"success": True}
        elif path == "/collective_rpc":
            assert body["method"] == "reload_weights"
            self.load_folder(body["kwargs"]["weights_path"])
        elif path == "/v1/load_lora_adapter":
            if body["lora_name"] in self.adapted and not body.get("load_inplace"):
                raise Refused(400, "already loaded")
            self.load_adapter(body["lora_name"], body["lora_path"])
        elif path == "/start_weight_update":
            self.pending = {}
        elif path == "/update_weights":
            self._take(body["update_info"])
        elif path == "/finish_weight_update":
            assert self.pending is not None
            self.load(self.pending)
            self.pending, self.version = None, (body or {}).get("weight_version", self.version)
        elif path == "/update_weight_version":
            self.version = body["new_version"]
        elif path == "/weight_info":
            return {"weight_version": self.said_version()}
        elif path == "/get_world_size":
            return {"world_size": 1}
        return {}

    def _take(self, info: dict[str, Any]) -> None:
        if self.pending is None:
            raise Refused(500, "no update was started")
        handles = pickle.loads(base64.b64decode(info["ipc_handles_pickled"]))
        for name, shape, handle in zip(info["names"], info["shapes"], handles, strict=True):
            tensor = HANDED[next(iter(handle.values()))[0]]
            assert list(tensor.shape) == shape
            self.pending[name] = tensor.clone()

    def _completion(self, body: dict[str, Any]) -> Any:
        if body["model"] not in ("policy", *self.adapted):
            raise Refused(404, f"The model `{body['model']}` does not exist.")
        salt = body.get("cache_salt", "")
        if "prompt_logprobs" in body:
            ids = body["prompt"]
            said = self.score(ids, salt, body["model"])
            rows = [{str(t): {"logprob": x}} for t, x in zip(ids[1:], said, strict=True)]
            return {"choices": [{"prompt_logprobs": [None, *rows]}]}
        asked = {
            "prompt": body["prompt"],
            "salt": salt,
            "model": body["model"],
            "most": body["max_tokens"],
            "least": body["min_tokens"],
            "temperature": body["temperature"],
            "seed": body["seed"],
            "ends": body["stop_token_ids"],
        }
        ids, logps, finish = self.write(asked)
        choice = {"token_ids": ids, "finish_reason": finish, "logprobs": {"token_logprobs": logps}}
        return {"choices": [choice]}

    def _sglang(self, path: str, query: str, body: Any) -> Any:
        if path == "/get_model_info":
            return {"model_path": str(self.folder), "weight_version": self.said_version()}
        if path == "/generate":
            return self._generated(body)
        if path == "/pause_generation":
            self.running.clear()
        elif path == "/continue_generation":
            self.running.set()
        elif path == "/flush_cache":
            self.clear()
        elif path == "/update_weights_from_disk":
            self.load_folder(body["model_path"])
            self.version = body["weight_version"]
            if body["flush_cache"]:
                self.clear()
            return {"success": True, "message": "done"}
        elif path == "/load_lora_adapter":
            self.load_adapter(body["lora_name"], body["lora_path"])
        elif path == "/unload_lora_adapter":
            del self.adapted[body["lora_name"]]
        elif path == "/update_weight_version":
            self.version = body["new_version"]
        return {}

    def _generated(self, body: dict[str, Any]) -> Any:
        how, name = body["sampling_params"], body.get("lora_path", "policy")
        if name != "policy" and name not in self.adapted:
            raise Refused(400, f"adapter {name} is not loaded")
        if body.get("logprob_start_len") == 0:
            said = self.score(body["input_ids"], body["extra_key"], name)
            rows = [[x, t, None] for t, x in zip(body["input_ids"][1:], said, strict=True)]
            return {"meta_info": {"input_token_logprobs": [[None, 0, None], *rows]}}
        asked = {
            "prompt": body["input_ids"],
            "salt": body["extra_key"],
            "model": name,
            "most": how["max_new_tokens"],
            "least": how["min_new_tokens"],
            "temperature": how["temperature"],
            "seed": how["sampling_seed"],
            "ends": how["stop_token_ids"],
        }
        ids, logps, finish = self.write(asked)
        meta = {
            "output_token_logprobs": [[x, t, None] for t, x in zip(ids, logps, strict=False)],
            "finish_reason": {"type": finish},
            "weight_version": self.said_version(),
        }
        return {"output_ids": ids, "meta_info": meta}


class _Http(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 512

    def __init__(self, address: tuple[str, int], fake: FakeServer) -> None:
        self.fake = fake
        super().__init__(address, _Handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Quiet: clients leave when they are told to."""


class _Handler(BaseHTTPRequestHandler):
    server: _Http

    def setup(self) -> None:
        super().setup()
        self.server.fake.sockets.add(self.connection)

    def finish(self) -> None:
        self.server.fake.sockets.discard(self.connection)
        super().finish()

    def do_GET(self) -> None:
        self._answer(None)

    def do_POST(self) -> None:
        data = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self._answer(json.loads(data) if data else None)

    def _answer(self, body: Any) -> None:
        fake, parts = self.server.fake, urlsplit(self.path)
        try:
            self._alive()
            with fake.lock:
                fake.calls.append((parts.path, body))
            status, said = 200, fake.answer(parts.path, parts.query, body)
            self._alive()
        except Refused as error:
            status, said = error.status, {"error": {"message": str(error)}}
        except ConnectionAbortedError:
            with contextlib.suppress(OSError):
                self.connection.shutdown(socket.SHUT_RDWR)
            return
        data = json.dumps(said).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _alive(self) -> None:
        """A process that has died says nothing any more, also where another has taken its place."""
        if self.server is not self.server.fake.http:
            raise ConnectionAbortedError

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet."""


@contextlib.contextmanager
def serving(folder: Path, count: int = 1, kind: str = "vllm", **rest: Any) -> Iterator[Any]:
    """So many servers of a folder; they end with the block."""
    made = [FakeServer(folder, kind, **rest) for _ in range(count)]
    try:
        yield made[0] if count == 1 else made
    finally:
        for each in made:
            each.stop()
