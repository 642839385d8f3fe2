"""vLLM itself, on a CPU, behind the engine: what the stand-in says of it holds.

`make vllm` makes its environment. Half a minute goes into starting it.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_zoo import ALPHABET, learner_logp, tokenizer
from served import ids, learn, requests

from groupwise.config import EngineSettings
from groupwise.engine.backends import EngineSetup
from groupwise.engine.protocol import Sampling
from groupwise.engine.servers.engine import ServerEngine, VllmEngine
from groupwise.errors import EngineError
from groupwise.model.config import ModelConfig
from groupwise.model.formats.checkpoint import Loaded, save
from groupwise.model.formats.tokenizer import character_files
from groupwise.model.layers.transformer import Transformer
from groupwise.sync.publish import Publisher

HOME = Path(__file__).resolve().parents[2] / ".venv-vllm"
PYTHON = os.environ.get("VLLM_PYTHON") or str(HOME / "bin" / "python")
READY = bool(os.environ.get("VLLM_PYTHON")) or (HOME / ".ready").is_file()
SHAPE = {
    "model_type": "llama", "vocab_size": 128, "hidden_size": 128, "intermediate_size": 256,
    "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2,
    "max_position_embeddings": 256, "tie_word_embeddings": True, "rms_norm_eps": 1e-5,
    "rope_theta": 1e4,
}  # fmt: skip
SAMPLING = Sampling(max_tokens=8, temperature=0.7)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not READY, reason="no vLLM for a CPU here: `make vllm` installs it"),
]


@pytest.fixture(scope="module")
def policy() -> Loaded:
    """A random model whose head is tied: vLLM on a CPU packs a head of its own of it."""
    model = Transformer(ModelConfig.from_hf(SHAPE))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.15, generator=generator)
    return Loaded(model, tokenizer((0,)), character_files(ALPHABET))


@pytest.fixture(scope="module")
def sampler(policy: Loaded, said: list[str]) -> Iterator[ServerEngine]:
    os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
    module, arguments = "vllm.entrypoints.openai.api_server", ("--enforce-eager",)
    settings = EngineSettings(
        backend="vllm", servers=1, command=(PYTHON, "-m", module, *arguments), timeout=500.0
    )
    setup = EngineSetup(
        policy, settings, 7, lambda kind, text: said.append(text), weights=Publisher(policy)
    )
    made = VllmEngine.made(setup)
    yield made
    for station in made.fleet.stations:
        if station.launched is not None:
            station.launched.stop()


@pytest.fixture(scope="module")
def said() -> list[str]:
    return []


def worst(policy: Loaded, groups: Any) -> float:
    return max(
        float((learner_logp(policy.model, request, each, 0.7) - each.logp_T).abs().max())
        for request, group in zip(requests(), groups, strict=True)
        for each in group
    )


def test_it_samples_from_the_learners_distribution_at_every_version(
    policy: Loaded, sampler: ServerEngine
) -> None:
    before = sampler.generate(requests(), SAMPLING)
    assert worst(policy, before) < 1e-4
    assert ids(sampler.generate(requests(), SAMPLING)) == ids(before)  # it looks at seeds
    learn(policy, 0.02)
    sampler.sync(1)
    after = sampler.generate(requests(), SAMPLING)
    assert worst(policy, after) < 1e-4 and ids(after) != ids(before)
    assert sampler.measures()["sync/probe_mean"] < 1e-4


def test_a_head_that_is_tied_in_its_files_stays_behind_and_is_seen(
    policy: Loaded, sampler: ServerEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Why the folders of a sync hold the head twice."""
    model, files = policy.model, policy.files
    monkeypatch.setattr(
        sampler.weights, "folder", lambda place, fold=True: save(model, place, files)
    )
    learn(policy, 0.021)
    with pytest.raises(EngineError, match="tied to the embedding"):
        sampler.sync(2)
    monkeypatch.undo()
    sampler.sync(2)
    assert worst(policy, sampler.generate(requests(), SAMPLING)) < 1e-4


def test_one_that_is_killed_comes_back_with_the_weights_of_now(
    policy: Loaded, sampler: ServerEngine, said: list[str]
) -> None:
    wanted = ids(sampler.generate(requests(), SAMPLING))
    (station,) = sampler.fleet.stations
    assert station.launched is not None and station.launched.process is not None
    os.killpg(station.launched.process.pid, signal.SIGKILL)
    assert ids(sampler.generate(requests(), SAMPLING)) == wanted
    assert sampler.measures()["sync/restarts"] == 1
    assert any("is back, synced and probed" in text for text in said)
