"""Servers that a run starts itself: their command, their log, and their end with the run's."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from groupwise.engine.servers.carriers import free_port
from groupwise.errors import EngineError

COMMANDS = {
    "vllm": ("-m", "vllm.entrypoints.openai.api_server"),
    "sglang": ("-m", "sglang.launch_server"),
}
MODEL = {"vllm": "--model", "sglang": "--model-path"}
ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1",  # pause, resume and weights are calls of that mode
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # of handles on tensors, on this machine alone
}
OURS = ("--host", "--port", "--model", "--model-path")
# Asks Linux to end the server when the run is killed, and becomes the server.
TIED = """
import ctypes, os, signal, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)
os.execvp(sys.argv[1], sys.argv[1:])
"""
LAST_LINES = 12  # of a log that are shown
END_SECONDS = 10.0  # for a server to end by itself


@dataclass(frozen=True)
class LaunchPlan:
    """How servers are started."""

    kind: str
    command: Sequence[str]  # empty: of this Python
    model: Path
    context: int
    dtype: str
    rank: int  # of the adapter that is swapped; 0: none
    quantization: str
    carrier: str

    def words(self, port: int) -> list[str]:
        """Return the command of one server."""
        begun = list(self.command) or [sys.executable, *COMMANDS[self.kind]]
        taken = [word for word in begun if word.split("=")[0] in OURS]
        if taken:
            raise EngineError(
                f"engine.command has {', '.join(taken)}, which every server gets from groupwise: "
                "its own port, and the policy of the run. Leave it out."
            )
        words = [*begun, MODEL[self.kind], str(self.model), "--host", "127.0.0.1"]
        words += ["--port", str(port), "--dtype", self.dtype]
        if self.quantization:
            words += ["--quantization", self.quantization]
        return words + (self._vllm() if self.kind == "vllm" else self._sglang())

    def _vllm(self) -> list[str]:
        words = ["--max-model-len", str(self.context), "--generation-config", "vllm"]
        words += ["--logprobs-mode", "processed_logprobs"]
        if self.rank:
            words += ["--enable-lora", "--max-lora-rank", str(max(8, self.rank))]
        if self.carrier != "folder":
            words += ["--weight-transfer-config", f'{{"backend": "{self.carrier}"}}']
        return words

    def _sglang(self) -> list[str]:
        words = ["--context-length", str(self.context), "--sampling-defaults", "openai"]
        # Without it, seeds of single requests are not looked at.
        words += ["--enable-deterministic-inference"]
        if self.rank:
            words += ["--enable-lora", "--max-lora-rank", str(self.rank)]
            words += ["--lora-target-modules", "all"]
        return words


@dataclass
class Launched:
    """A server of ours. It ends when the run does, whatever ends that."""

    plan: LaunchPlan
    number: int
    log: Path
    gpus: int
    port: int = 0
    process: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    def start(self) -> str:
        """Start it, on a port of its own; return its address."""
        self.stop()
        self.port = free_port()
        words, environment = self.plan.words(self.port), {**os.environ, **ENVIRONMENT}
        gpu = gpu_of(self.number, self.gpus, environment.get("CUDA_VISIBLE_DEVICES", ""))
        if gpu:
            environment["CUDA_VISIBLE_DEVICES"] = gpu
        if shutil.which(words[0]) is None:
            raise EngineError(
                f"engine.servers can't start {words[0]!r}: there is no such program. Give the "
                "command in engine.command, for example "
                '["/path/of/its/bin/python", "-m", "vllm.entrypoints.openai.api_server"].'
            )
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", TIED, *words],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,  # its own workers end with it
            )
        return f"http://127.0.0.1:{self.port}"

    @property
    def ended(self) -> int | None:
        """Return the exit status of one that has ended."""
        return None if self.process is None else self.process.poll()

    def last_words(self) -> str:
        """Return the end of its log."""
        try:
            lines = self.log.read_text("utf-8", "replace").splitlines()
        except OSError:
            return ""
        return "\n".join(lines[-LAST_LINES:])

    def stop(self) -> None:
        """End it and all that it has started."""
        process, self.process = self.process, None
        if process is None:
            return
        for sign in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, sign)
            try:
                process.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                continue
            if sign is signal.SIGTERM:
                continue  # whatever it has left behind
        process.wait()


def gpu_of(number: int, gpus: int, visible: str) -> str:
    """Return the GPU of a server, as the environment names it: the last ones, from the end.

    The learner has the first. With one GPU, all share it.
    """
    known = [name for name in visible.split(",") if name] or [str(n) for n in range(gpus)]
    if len(known) < 2:
        return ""
    return known[-1 - number % (len(known) - 1)]
