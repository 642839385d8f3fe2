"""Damaged files of every kind: they load or are refused in words, at once, and nothing else."""

from __future__ import annotations

import json
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
from damage import CHAT, KINDS, TEMPLATES, attack
from model_zoo import CONFIGS, make

from groupwise import load_config
from groupwise.errors import ConfigError, ModelError
from groupwise.model.borrowed.families import read_shape
from groupwise.model.config import ModelConfig
from groupwise.model.formats import rendering
from groupwise.model.formats.checkpoint import load, save, stored_shape
from groupwise.model.formats.fields import library
from groupwise.model.formats.tokenizer import Tokenizer, character_files

SLOW = {"config.json": 20, "chat_template.jinja": 20}  # tries: deep models, processes that end


@pytest.mark.parametrize("kind", KINDS)
def test_damage_is_refused_in_words(kind: str) -> None:
    tally = attack(kind, SLOW.get(kind, 50), seed=1)
    assert tally.tracebacks == []
    assert tally.errors and tally.errors + tally.loaded == tally.tried


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_much_damage_is_refused_in_words(kind: str) -> None:
    assert attack(kind, 2000).tracebacks == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"num_hidden_layers": 2**63}, "num_hidden_layers is 9223372036854775808, and must be"),
        ({"num_hidden_layers": True}, "num_hidden_layers is True"),
        ({"hidden_size": "48"}, "hidden_size is '48', and must be a whole number"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0"),
        ({"head_dim": -2}, "head_dim is -2"),
        ({"vocab_size": None}, "no 'vocab_size'"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan, and must be a number from 0 to 1"),
        ({"rope_theta": 0}, "rope_theta is 0, and must be a number above 0"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings is 'false', and must be true or"),
        ({"rope_scaling": [8]}, "rope_scaling is [8], and must be a table"),
        ({"rope_scaling": {"rope_type": "linear", "factor": "8"}}, "factor is '8'"),
        ({"layer_types": [1]}, "layer_types is [1], and must be a list of texts"),
        ({"model_type": ["llama"]}, "model_type is ['llama'], and must be a text"),
    ],
)
def test_a_field_of_config_json_is_named(change: dict[str, Any], said: str, tmp_path: Path) -> None:
    raw = CONFIGS["llama2"] | change
    with pytest.raises(ModelError) as caught:
        ModelConfig.from_hf(raw)
    assert said in str(caught.value) and "etch" in str(caught.value)
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ModelError, match=str(tmp_path)):
        load(tmp_path)


def test_llama3_factors_that_would_divide_by_zero() -> None:
    scaling = CONFIGS["llama3"]["rope_scaling"] | {"low_freq_factor": 4.0}
    with pytest.raises(ModelError, match=r"low_freq_factor 4.0 .* is not below high_freq_factor"):
        ModelConfig.from_hf(CONFIGS["llama3"] | {"rope_scaling": scaling})


@pytest.mark.parametrize(
    "change",
    [
        {"num_hidden_layers": 2**63},
        {"num_hidden_layers": 10**6},
        {"text_config": {"n_layer": 10**6}},
        {"num_local_experts": 10**9},
        {"head_dim": 2**40},
    ],
)
def test_transformers_is_not_asked_to_count_for_ever(change: dict[str, Any]) -> None:
    pytest.importorskip("transformers")
    with pytest.raises(ModelError, match="must be at most"):
        read_shape(CONFIGS["llama2"] | {"model_type": "gemma2"} | change)


def test_an_end_in_a_list_alone_is_taken() -> None:
    """A tokenizer that names no eos_token, beside a list of its numbers."""
    files = character_files("ab")
    files["tokenizer_config.json"] = b"{}"
    files["generation_config.json"] = b'{"eos_token_id": [0, 1]}'
    assert Tokenizer.from_files(files).eos_ids == (0, 1)


def test_shards_are_files_of_the_folder(tmp_path: Path) -> None:
    save(make("qwen2"), tmp_path / "model", character_files("ab"), shard_bytes=60_000)
    index = tmp_path / "model" / "model.safetensors.index.json"
    raw = json.loads(index.read_bytes())
    raw["weight_map"] = dict.fromkeys(raw["weight_map"], "../elsewhere.safetensors")
    index.write_text(json.dumps(raw))
    with pytest.raises(ModelError, match=r"weight_map is .* names of files beside it"):
        load(tmp_path / "model")


def test_weights_of_whole_numbers_are_refused(tmp_path: Path) -> None:
    save(make("qwen2"), tmp_path / "model", character_files("ab"))
    file = tmp_path / "model" / "model.safetensors"
    file.write_bytes(file.read_bytes().replace(b'"F32"', b'"I32"'))
    with pytest.raises(ModelError, match="is stored as int32"):
        load(tmp_path / "model")


def test_a_shape_that_can_not_be_read_is_none(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("[" * 100_000)
    assert stored_shape(tmp_path) is None


def test_toml_that_is_nested_too_deep(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    for text in ("x = " + "[" * 5000 + "]" * 5000, f"recipe{'.x' * 5000} = 1"):
        path.write_text(text)
        with pytest.raises(ConfigError, match="nests tables or lists too deep"):
            load_config(path)
    path.write_text(f"group_size = {'9' * 5000}")
    with pytest.raises(ConfigError, match=r"run\.toml is no valid TOML"):
        load_config(path)
    path.write_text(f"group_size = {'9' * 400}")
    with pytest.raises(ConfigError, match="is out of range"):
        load_config(path)


class Panic(BaseException):
    """As pyo3 names what a panic of Rust becomes."""


Panic.__name__ = "PanicException"


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError, SystemExit])
def test_what_is_not_the_files_fault_passes(error: type[BaseException]) -> None:
    with pytest.raises(error), library("what", "do"):
        raise error
    for fault in (Panic, ValueError, RecursionError):
        with pytest.raises(ModelError, match=r"what .*do"), library("what", "do"):
            raise fault


# --- chat templates ---------------------------------------------------------------------------


ENDLESS = ("99999", "10 **", "lipsum", "f(90)")  # each takes its seconds


@pytest.mark.parametrize(
    "template",
    [
        pytest.param(x, marks=pytest.mark.slow if any(y in x for y in ENDLESS) else [])
        for x in TEMPLATES
    ],
)
def test_a_template_ends_and_the_next_is_rendered(template: str) -> None:
    """Limits are of the processor and of memory, not of the clock."""
    done, text = rendering.render(template, {"messages": CHAT})
    assert not done or len(text) < 1000
    assert rendering.render("{{ messages[0].content }}", {"messages": CHAT}) == (True, "1+2")


def test_an_endless_template_is_named_in_the_error() -> None:
    tokenizer = Tokenizer.from_files(character_files("ab"))
    tokenizer.template = "{{ 10 ** (10 ** 10) }}"
    with pytest.raises(ModelError, match=r"roles \['user'\]: it does not end within 3 s"):
        tokenizer.render(CHAT)


def test_a_process_that_was_killed_is_started_again() -> None:
    assert rendering.render("a", {}) == (True, "a")
    process = rendering._renderers[os.getpid()]
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert rendering.render("a", {})[0] is False
    assert rendering.render("a", {}) == (True, "a")


def test_threads_get_their_own_texts() -> None:
    found: dict[int, list[str]] = {}

    def ask(number: int) -> None:
        found[number] = [rendering.render("{{ n }}", {"n": number})[1] for _ in range(50)]

    threads = [threading.Thread(target=ask, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {n: [str(n)] * 50 for n in range(4)}


def test_a_fork_has_its_own_process() -> None:
    assert rendering.render("a", {}) == (True, "a")
    mine = rendering._renderers[os.getpid()]
    child = os.fork()
    if child == 0:
        done = rendering.render("b", {}) == (True, "b")
        other = rendering._renderers.get(os.getpid(), mine)
        rendering._end()
        os._exit(0 if done and other is not mine else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert rendering.render("c", {}) == (True, "c")
