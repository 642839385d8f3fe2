"""SGLang's server: `/generate` by token ids, weights from a folder on its disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

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

GENERATE, DISK, ADAPTER = "/generate", "/update_weights_from_disk", "groupwise"
NEEDED = (GENERATE, DISK, "/pause_generation", "/continue_generation", "/flush_cache")
SEED = 2**31 - 1  # its seeds are 32-bit numbers


class SglangServer(InferenceServer):
    """A server that `python -m sglang.launch_server` starts."""

    kind, product = "sglang", "SGLang"
    key_variable = "SGLANG_API_KEY"
    flags = "--enable-deterministic-inference (else it does not look at seeds)"

    def __init__(self, url: str, seconds: float) -> None:
        super().__init__(url, seconds)
        self.adapter = ""

    def look(self, carrier: str) -> Facts:
        self.described(GENERATE)
        lacking = [path for path in NEEDED if path not in self.paths]
        if lacking:
            raise EngineError(
                f"The SGLang at {self.url} lacks {', '.join(lacking)}. Take a newer version."
            )
        info = self.link.get(self._info, seconds=LOOK_SECONDS, doing=LOOKING)
        model = member(info, "model_path")
        context = member(info, "max_context_length") or member(info, "context_length")
        self.facts = Facts(str(model), context if isinstance(context, int) else 0)
        return self.facts

    @property
    def _info(self) -> str:
        return "/model_info" if "/model_info" in self.paths else "/get_model_info"

    def generate(self, ask: Ask, call: PendingCall) -> ServerReply:
        sampling = ask.sampling
        body: Body = {
            "input_ids": list(ask.prompt),
            "sampling_params": {
                "max_new_tokens": ask.most,
                "min_new_tokens": ask.least,
                "temperature": sampling.temperature,
                "top_p": sampling.top_p,
                "top_k": sampling.top_k or -1,
                "min_p": 0.0,
                "repetition_penalty": 1.0,
                "presence_penalty": 0.0,
                "frequency_penalty": 0.0,
                "stop": list(sampling.stop),
                "stop_token_ids": list(ask.ends),
                "ignore_eos": True,
                "no_stop_trim": True,
                "skip_special_tokens": False,
                "sampling_seed": ask.seed % SEED,
                "n": 1,
            },
            "return_logprob": True,
            "extra_key": ask.salt,
        }
        if self.adapter:
            body["lora_path"] = self.adapter
        doing = "writing an answer"
        found = self.link.post(GENERATE, body, seconds=self.seconds, doing=doing, call=call)
        meta = member(found, "meta_info")
        said, ids = member(meta, "output_token_logprobs"), ids_of(member(found, "output_ids"))
        if not isinstance(said, list) or ids is None:
            raise ServerFailed(f"{self.url} answers without token ids or log-probabilities")
        logps = self.logps([member(row, 0) for row in said], "an answer")
        version = member(meta, "weight_version")
        finish = str(member(meta, "finish_reason", "type"))
        return ServerReply(ids, logps, finish, None if version is None else str(version))

    def score(self, ids: Ids, salt: str) -> Tensor:
        body: Body = {
            "input_ids": list(ids),
            "sampling_params": {"max_new_tokens": 1, "temperature": 1.0, "ignore_eos": True},
            "return_logprob": True,
            "logprob_start_len": 0,
            "extra_key": salt,
        }
        if self.adapter:
            body["lora_path"] = self.adapter
        found = self.link.post(GENERATE, body, seconds=self.seconds, doing="scoring the probe")
        said = member(found, "meta_info", "input_token_logprobs")
        if not isinstance(said, list):
            raise ServerFailed(
                f"{self.url} gives no input_token_logprobs: it can't score the probe"
            )
        return self.scored([member(row, 0) for row in said[1:]], ids)

    def pause(self) -> None:
        self._call("/pause_generation", "pausing before new weights", {"mode": "abort"})

    def resume(self) -> None:
        self._call("/continue_generation", "resuming behind new weights", {})

    def clear(self) -> None:
        self._call("/flush_cache", "clearing its cache of prompts", None)

    def take_folder(self, place: Path, version: str) -> None:
        body = {"model_path": str(place), "flush_cache": True, "weight_version": version}
        found = self._call(DISK, f"reading weights from {place}", body)
        if member(found, "success") is not True:
            raise ServerFailed(f"{self.url} did not take the weights: {member(found, 'message')}")

    @property
    def swaps_adapters(self) -> bool:
        return "/load_lora_adapter" in self.paths and "/unload_lora_adapter" in self.paths

    def take_adapter(self, place: Path, version: str) -> None:
        """Load under a new name, then drop the old one: it has no call that does both."""
        before, name = self.adapter, f"{ADAPTER}-{version}"
        doing = f"reading an adapter from {place}"
        if name != before:
            body = {"lora_name": name, "lora_path": str(place)}
            self._call("/load_lora_adapter", doing, body)
            self.adapter = name
        if before and before != name:
            self._call("/unload_lora_adapter", doing, {"lora_name": before})
        self.says(version)

    def says(self, version: str) -> None:
        if "/update_weight_version" in self.paths:
            body = {"new_version": version}
            self._call("/update_weight_version", "telling the version of its weights", body)

    def version(self) -> str | None:
        doing = "asking for the version of its weights"
        said = member(
            self.link.get(self._info, seconds=LOOK_SECONDS, doing=doing), "weight_version"
        )
        return None if said is None else str(said)

    def _call(self, path: str, doing: str, body: Body | None) -> Any:
        try:
            return self.link.post(path, body, seconds=self.seconds, doing=doing)
        except ServerRefused as error:
            raise ServerFailed(str(error)) from None
