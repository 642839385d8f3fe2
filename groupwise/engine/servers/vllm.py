"""vLLM's server: completions by token ids, and the calls of its development mode for weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from torch import Tensor

from groupwise.engine.servers.link import PendingCall, ServerFailed, ServerRefused
from groupwise.engine.servers.server import (
    LOOK_SECONDS,
    LOOKING,
    Ask,
    Body,
    Facts,
    InferenceServer,
    ServerReply,
    ids_of,
    member,
)
from groupwise.engine.servers.weights import Ids
from groupwise.errors import EngineError

COMPLETIONS, ADAPTER = "/v1/completions", "groupwise"
FOLDER, LORA = "/collective_rpc", "/v1/load_lora_adapter"
# What each way of weights needs, by the path of its call.
NEEDED = {
    "folder": (FOLDER,),
    "ipc": ("/init_weight_transfer_engine", "/update_weights", "/finish_weight_update"),
    "nccl": ("/init_weight_transfer_engine", "/update_weights", "/finish_weight_update"),
}
ALWAYS = (COMPLETIONS, "/v1/models", "/pause", "/resume", "/reset_prefix_cache")
FIELDS = ("return_token_ids", "prompt_logprobs", "logprobs", "seed", "stop_token_ids")


class VllmServer(InferenceServer):
    """A server that `python -m vllm.entrypoints.openai.api_server` or `vllm serve` starts."""

    kind, product = "vllm", "vLLM"
    key_variable = "VLLM_API_KEY"
    flags = "VLLM_SERVER_DEV_MODE=1 in its environment, and --logprobs-mode processed_logprobs"

    def __init__(self, url: str, seconds: float) -> None:
        super().__init__(url, seconds)
        self.fields: frozenset[str] = frozenset()
        self.base = self.name = ""  # of the model, and of what answers: an adapter has its own

    def look(self, carrier: str) -> Facts:
        page = self.described(COMPLETIONS)
        schema = member(page, "components", "schemas", "CompletionRequest", "properties")
        self.fields = frozenset(schema or ())
        lacking = [path for path in (*ALWAYS, *NEEDED[carrier]) if path not in self.paths]
        lacking += [field for field in FIELDS if field not in self.fields]
        if lacking:
            raise EngineError(
                f"The vLLM at {self.url} lacks {', '.join(lacking)}. Start it with {self.flags}; "
                "versions before 0.26 have not all of it."
            )
        models = member(self.link.get("/v1/models", seconds=LOOK_SECONDS, doing=LOOKING), "data")
        base = [x for x in models or () if isinstance(x, dict) and not x.get("parent")]
        if not base or not isinstance(base[0].get("id"), str):
            raise EngineError(f"The vLLM at {self.url} serves no model. Start it with one.")
        self.base = self.name = base[0]["id"]
        self.facts = Facts(self.base, base[0].get("max_model_len") or 0)
        return self.facts

    def generate(self, ask: Ask, call: PendingCall) -> ServerReply:
        sampling = ask.sampling
        body: Body = {
            "model": self.name,
            "prompt": list(ask.prompt),
            "max_tokens": ask.most,
            "min_tokens": ask.least,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "stop": list(sampling.stop),
            # Said, all of it: a model's folder may come with other defaults.
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "stop_token_ids": list(ask.ends),
            "ignore_eos": True,  # the ids above are all that end it
            "seed": ask.seed,
            "n": 1,
            "logprobs": 0,
            "return_token_ids": True,
            "skip_special_tokens": False,
        }
        if "cache_salt" in self.fields:
            body["cache_salt"] = ask.salt
        doing = "writing an answer"
        found = self.link.post(COMPLETIONS, body, seconds=self.seconds, doing=doing, call=call)
        choice = member(found, "choices", 0)
        ids, logps = ids_of(member(choice, "token_ids")), member(choice, "logprobs")
        said = member(logps, "token_logprobs")
        if ids is None or not isinstance(said, list):
            raise ServerFailed(
                f"{self.url} answers without token ids or log-probabilities; start it with "
                f"{self.flags}"
            )
        return ServerReply(ids, self.logps(said, "an answer"), str(member(choice, "finish_reason")))

    def score(self, ids: Ids, salt: str) -> Tensor:
        body: Body = {
            "model": self.name,
            "prompt": list(ids),
            "max_tokens": 1,
            "temperature": 1.0,
            "prompt_logprobs": 0,
            "seed": 0,
        }
        if "cache_salt" in self.fields:
            body["cache_salt"] = salt
        doing = "scoring the probe"
        found = self.link.post(COMPLETIONS, body, seconds=self.seconds, doing=doing)
        rows = member(found, "choices", 0, "prompt_logprobs")
        if not isinstance(rows, list):
            raise ServerFailed(f"{self.url} gives no prompt_logprobs: it can't score the probe")
        said = [member(row, str(token), "logprob") for row, token in zip(rows, ids, strict=False)]
        return self.scored(said[1:], ids)

    def pause(self) -> None:
        asked = urlencode({"mode": "abort", "clear_cache": "true"})
        self._call(f"/pause?{asked}", "pausing before new weights")

    def resume(self) -> None:
        self._call("/resume", "resuming behind new weights")

    def clear(self) -> None:
        found = self._call("/reset_prefix_cache", "clearing its cache of prompts")
        if member(found, "success") is False:
            raise ServerFailed(f"{self.url} could not clear its cache of prompts")

    def take_folder(self, place: Path, version: str) -> None:
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(place)}}
        self._call(FOLDER, f"reading weights from {place}", body)
        self.says(version)

    @property
    def swaps_adapters(self) -> bool:
        return LORA in self.paths

    def take_adapter(self, place: Path, version: str) -> None:
        body = {"lora_name": ADAPTER, "lora_path": str(place), "load_inplace": True}
        self._call(LORA, f"reading an adapter from {place}", body)
        self.name = ADAPTER
        self.says(version)

    def says(self, version: str) -> None:
        if "/update_weight_version" in self.paths:
            body = {"new_version": version}
            self._call("/update_weight_version", "telling the version of its weights", body)

    def version(self) -> str | None:
        if "/weight_info" not in self.paths:
            return None
        doing = "asking for the version of its weights"
        found = self.link.get("/weight_info", seconds=LOOK_SECONDS, doing=doing)
        said = member(found, "weight_version")
        return None if said is None else str(said)

    # --- the calls of its weight transfer: docs/engines.md says which were run for real ---

    def init_weight_transfer_engine(self, init_info: Body) -> None:
        body = {"init_info": init_info}
        self._call("/init_weight_transfer_engine", "preparing for weights", body)

    def start_weight_update(self) -> None:
        """Begin: the older form wants to be told that names are those of a checkpoint."""
        call = "/start_weight_update"
        if call in self.paths:
            older = member(self.paths[call], "post", "requestBody") is not None
            body = {"is_checkpoint_format": True} if older else None
            self._call(call, "beginning to take weights", body)

    def update_weights(self, update_info: Body) -> None:
        self._call("/update_weights", "taking weights", {"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        body = None if weight_version is None else {"weight_version": weight_version}
        self._call("/finish_weight_update", "ending to take weights", body)

    def world_size(self) -> int:
        """Return how many GPUs it spreads over."""
        doing = "asking how many GPUs it has"
        found = self.link.get("/get_world_size", seconds=LOOK_SECONDS, doing=doing)
        size = member(found, "world_size")
        return size if isinstance(size, int) else 1

    def _call(self, path: str, doing: str, body: Body | None = None) -> Any:
        try:
            return self.link.post(path, body, seconds=self.seconds, doing=doing)
        except ServerRefused as error:
            raise ServerFailed(str(error)) from None
