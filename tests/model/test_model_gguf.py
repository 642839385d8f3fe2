"""GGUF: blocks by hand, a file written here and read back, and what is damaged or unknown."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf_files import TOKENS, gguf_tensors, metadata, write
from model_zoo import CONFIGS, all_logits, make, sequences
from runs import run

from groupwise.errors import ModelError
from groupwise.model.formats.checkpoint import load, save, stored_tokenizer
from groupwise.model.formats.gguf import GGUFFile, hf_name
from groupwise.model.formats.gguf_blocks import TYPES, unpack
from groupwise.model.layers.transformer import Transformer
from groupwise.sync.export import checkpoint_in, export


def half(x: float) -> bytes:
    return struct.pack("<e", x)


def numbers(kind: str, raw: bytes) -> list[float]:
    code = next(number for number, (name, _, _) in TYPES.items() if name == kind)
    return unpack(code, np.frombuffer(raw, np.uint8)).tolist()


def test_blocks_by_hand() -> None:
    assert numbers("F32", struct.pack("<2f", 1.5, -2.25)) == [1.5, -2.25]
    assert numbers("F16", half(0.5) + half(-3)) == [0.5, -3.0]
    assert numbers("BF16", bytes([0x80, 0x3F, 0x20, 0xC0])) == [1.0, -2.5]
    q8 = half(0.5) + struct.pack("<32b", *range(-16, 16))
    assert numbers("Q8_0", q8) == [0.5 * i for i in range(-16, 16)]
    nibbles = bytes((i | ((15 - i) << 4)) for i in range(16))  # low 0..15, high 15..0
    up, down = list(range(16)), list(range(15, -1, -1))
    assert numbers("Q4_0", half(2) + nibbles) == [2.0 * (i - 8) for i in up + down]
    assert numbers("Q4_1", half(2) + half(0.25) + nibbles) == [2.0 * i + 0.25 for i in up + down]
    fifth = struct.pack("<I", 0x0000FFFF)  # the first sixteen get 16 more
    tall = [i + 16 for i in up] + down
    assert numbers("Q5_0", half(2) + fifth + nibbles) == [2.0 * (i - 16) for i in tall]
    assert numbers("Q5_1", half(2) + half(0.25) + fifth + nibbles) == [2.0 * i + 0.25 for i in tall]


def test_blocks_of_256_by_hand() -> None:
    # Scales 1, 2, 3, 4 and offsets 5, 6, 7, 8 for the first half; 9 + 16 and 10 + 32 for the
    # fifth eighth, whose upper bits ride on the first bytes. All weights are 3 (low) and 2 (high).
    scales = bytes([1 | 0x40, 2, 3, 4, 5 | 0x80, 6, 7, 8, 9 | (10 << 4), 0, 0, 0])
    found = numbers("Q4_K", half(1) + half(0.5) + scales + bytes([0x23]) * 128)
    assert found[0] == 1 * 3 - 0.5 * 5 and found[32] == 2 * 2 - 0.5 * 6
    assert found[64] == 3 * 3 - 0.5 * 7 and found[96] == 4 * 2 - 0.5 * 8
    assert found[128] == 25 * 3 - 0.5 * 42
    fives = numbers("Q5_K", half(1) + half(0.5) + scales + bytes([0b10]) * 32 + bytes([0x23]) * 128)
    assert fives[0] == found[0] and fives[32] == 2 * (2 + 16) - 0.5 * 6
    low, high = bytes([0x23]) * 128, bytes([0b11100100]) * 64
    six = numbers("Q6_K", low + high + struct.pack("<16b", *range(-8, 8)) + half(0.5))
    assert six[0] == 0.5 * -8 * (3 - 32) and six[32] == 0.5 * -6 * (3 + 16 - 32)
    assert six[64] == 0.5 * -4 * (2 + 32 - 32) and six[96] == 0.5 * -2 * (2 + 48 - 32)
    assert six[255] == 0.5 * 7 * (2 + 48 - 32)


@pytest.mark.parametrize("kind", [n for n, (name, _, _) in TYPES.items() if name[0] == "Q"])
def test_blocks_equal_the_reference_reader(kind: int) -> None:
    quants = pytest.importorskip("gguf.quants")
    constants = pytest.importorskip("gguf.constants")
    name, _, size = TYPES[kind]
    raw = np.random.default_rng(kind).integers(0, 256, (200, size), dtype=np.uint8)
    for at in {"Q6_K": [208]}.get(name, [0, 2]):  # half-precision numbers that are no NaN
        raw[:, at + 1] &= 0x3F
    expected = quants.dequantize(raw, constants.GGMLQuantizationType(kind))
    assert np.array_equal(unpack(kind, raw), expected.reshape(-1))


@pytest.mark.parametrize(
    ("name", "family"),
    [("smollm2", "llama"), ("llama_biases", "llama"), ("qwen2", "qwen2"), ("qwen3", "qwen3")],
)
def test_a_file_gives_the_model_back(name: str, family: str, tmp_path: Path) -> None:
    model, path = make(name), tmp_path / "model.gguf"
    if name == "llama_biases":  # GGUF's Llama has no biases in the feed-forward part
        raw = {key: value for key, value in CONFIGS[name].items() if key != "mlp_bias"}
        from groupwise.model.config import ModelConfig

        model = Transformer(ModelConfig.from_hf(raw)).initialise(torch.Generator().manual_seed(1))
    write(path, metadata(model, family), gguf_tensors(model, family))
    found = load(path)
    assert found.model.config == model.config
    state = model.state_dict()
    assert all(torch.equal(x, state[k]) for k, x in found.model.state_dict().items())
    save(found.model, tmp_path / "folder", found.files)
    again = load(tmp_path / "folder")
    assert again.tokenizer.encode("ab 12 ab") == found.tokenizer.encode("ab 12 ab")
    rows = sequences([8])
    torch.testing.assert_close(all_logits(again.model, rows), all_logits(model, rows))


def test_the_tokenizer_is_rebuilt(tmp_path: Path) -> None:
    model, path = make("smollm2"), tmp_path / "model.gguf"
    write(path, metadata(model, "llama"), gguf_tensors(model, "llama"))
    tokenizer = load(path).tokenizer
    ids = tokenizer.encode("ab 12<|end|>\n")
    # Digits stand alone, although "12" is a token; the control token is one token.
    assert [TOKENS[i] for i in ids] == ["ab", "Ġ", "1", "2", "<|end|>", "Ċ"]
    assert tokenizer.decode(ids) == "ab 12<|end|>\n"
    assert tokenizer.eos_ids == (0,) and tokenizer.bos_id == 1
    assert tokenizer.prompt([{"role": "user", "content": "a"}]) == [1, TOKENS.index("a")]
    alone = stored_tokenizer(path)  # without the weights
    assert alone.encode("ab 12<|end|>\n") == ids and alone.eos_ids == (0,)


def test_llama3_rope_is_recognised_by_its_divisors(tmp_path: Path) -> None:
    model, path = make("smollm2"), tmp_path / "model.gguf"
    meta, tensors = metadata(model, "llama"), gguf_tensors(model, "llama")
    # head_dim 8, theta 1e5: wavelengths 6.28, 111.7, 1987, 35332 against 8192: only the last is
    # longer; 1987 turns 4.12 times, which is fast still. So the divisors are 1, 1, 1, 8.
    tensors["rope_freqs.weight"] = np.array([1, 1, 1, 8], dtype=np.float32)
    write(path, meta, tensors)
    assert load(path).model.config.rope.kind == "llama3"
    assert load(path).model.config.rope.factor == 8.0
    tensors["rope_freqs.weight"] = np.array([1, 1, 2, 8], dtype=np.float32)
    write(path, meta, tensors)
    with pytest.raises(ModelError, match="a table that Llama 3's rule does not give"):
        load(path)


def test_unknown_and_damaged_files_are_refused(tmp_path: Path) -> None:
    model, path = make("smollm2"), tmp_path / "model.gguf"
    meta, tensors = metadata(model, "llama"), gguf_tensors(model, "llama")
    write(path, meta, tensors)
    whole = path.read_bytes()
    for size in (10, 300, 3000, len(whole) - 100):
        path.write_bytes(whole[:size])
        with pytest.raises(ModelError, match="cut short"):
            GGUFFile(path)
    path.write_bytes(b"PK\3\4" + whole[4:])
    with pytest.raises(ModelError, match="no GGUF file"):
        GGUFFile(path)
    path.write_bytes(whole[:4] + struct.pack("<I", 9) + whole[8:])
    with pytest.raises(ModelError, match="GGUF version 9"):
        GGUFFile(path)
    with pytest.raises(ModelError, match="can't be read"):
        GGUFFile(tmp_path / "absent.gguf")
    write(path, meta | {"general.architecture": "gemma2"}, tensors)
    with pytest.raises(ModelError, match="architecture 'gemma2'"):
        load(path)
    write(path, meta | {"llama.expert_count": 8}, tensors)
    with pytest.raises(ModelError, match="mixture of experts"):
        load(path)
    write(path, meta | {"tokenizer.ggml.pre": "tekken"}, tensors)
    with pytest.raises(ModelError, match="rule 'tekken'"):
        load(path)
    with pytest.raises(ModelError, match=r"ssm_a.* has no place"):
        hf_name("blk.0.ssm_a.weight")


def test_an_adapter_on_a_file_is_exported_beside_a_folder_that_peft_can_load(
    tmp_path: Path,
) -> None:
    """PEFT loads folders alone: the words say how to make one of the file, and what they say does
    it."""
    model, path = make("smollm2"), tmp_path / "my model.gguf"
    write(path, metadata(model, "llama"), gguf_tensors(model, "llama"))
    settings = {"model__path": str(path), "adapter__rank": 2, "steps": 1, "eval__tasks": 0}
    run(tmp_path / "run", **settings)
    checkpoint = Path(checkpoint_in(tmp_path / "run"))
    with pytest.raises(ModelError, match="PEFT loads folders alone") as refused:
        export(checkpoint, tmp_path / "adapter", adapter=True)
    assert f"groupwise export '{path}' BASE --dtype float32" in str(refused.value)  # to be pasted
    with pytest.raises(ModelError, match="a folder is written, and no GGUF file"):
        export(path, tmp_path / "out.gguf", torch.float32)
    export(path, tmp_path / "base", torch.float32)
    export(checkpoint, tmp_path / "adapter", adapter=True, base=tmp_path / "base")
    told = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert told["base_model_name_or_path"] == str(tmp_path / "base")
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    peft.PeftModel.from_pretrained(base, tmp_path / "adapter")
