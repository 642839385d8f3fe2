"""Architectures that run through transformers: the numbers of its own forward pass."""

from __future__ import annotations

import copy
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import engine_zoo
import pytest
import torch
from family_zoo import (
    FAMILIES,
    WINDOW,
    config_json,
    folder,
    image_model,
    lender,
    own_logp,
    packed_logp,
)
from model_zoo import sequences
from torch import Tensor

from groupwise.engine.protocol import Request, Sampling
from groupwise.errors import ModelError
from groupwise.model.borrowed import rehearsal
from groupwise.model.borrowed.families import borrowed_shape, read_shape
from groupwise.model.borrowed.policy import Borrowed
from groupwise.model.formats.checkpoint import load_weights, save
from groupwise.model.layers.attention import (
    packed,
    packed_positions,
    shared_positions,
    shared_prompts,
)
from groupwise.model.layers.equip import equip
from groupwise.model.layers.transformer import Transformer
from groupwise.optim.packs import Sequences, outputs

LENGTHS = [3, 29, 17, 1 + WINDOW]  # most are longer than the windows
CLOSE = 2e-5


def borrowed(name: str) -> Borrowed:
    model = load_weights(folder(name))
    assert isinstance(model, Borrowed)
    return model


@pytest.mark.parametrize("name", FAMILIES)
def test_a_pack_equals_transformers_on_each_sequence_alone(name: str) -> None:
    model, own = borrowed(name), lender(name)
    rows = sequences(LENGTHS)
    with torch.no_grad():
        for row, logp_T in zip(rows, packed_logp(model, rows), strict=True):
            torch.testing.assert_close(logp_T.double(), own_logp(own, row), atol=CLOSE, rtol=0)


@pytest.mark.parametrize("name", FAMILIES)
def test_answers_behind_a_shared_prompt_equal_transformers_on_each_alone(name: str) -> None:
    """The learner's own road: packs of groups, the head without logits in memory."""
    model, own = borrowed(name), lender(name)
    first, second, *answers = sequences([12, 5, 21, 4, 2, 11])
    prompts = [first, first, second, second]
    batch = Sequences([tuple(p.tolist()) for p in prompts], [tuple(a.tolist()) for a in answers])
    with torch.no_grad():
        found = outputs(model, batch.pack(range(4)), temperature=1.0)["logp_NT"]
    for row, prompt_T, answer_T in zip(found, prompts, answers, strict=True):
        expected = own_logp(own, torch.cat((prompt_T, answer_T)))[len(prompt_T) - 1 :]
        torch.testing.assert_close(row[: len(answer_T)].double(), expected, atol=CLOSE, rtol=0)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_sampler_chooses_and_scores_as_transformers_does(name: str) -> None:
    """Greedy tokens are those of transformers' generate; sampled ones have the learner's log p."""
    model, own = borrowed(name), lender(name)
    engine = engine_zoo.engine(model, slots=4)
    asked = [engine_zoo.request(length, 1, number) for number, length in enumerate((3, 14))]
    groups = engine.generate(asked, Sampling(max_tokens=12, temperature=0.0))
    for request, (done,) in zip(asked, groups, strict=True):
        ids = torch.tensor([request.prompt])
        made = own.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, min_new_tokens=12,
            do_sample=False, eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
        assert done.token_ids == tuple(made[0, len(request.prompt) :].tolist())
    request = engine_zoo.request(6, 3, 9)
    group = engine_zoo.one(engine, request, Sampling(max_tokens=16, temperature=0.7))
    for done in group:
        row_T = torch.tensor([*request.prompt, *done.token_ids])
        with torch.no_grad():
            own_TV = own(input_ids=row_T[None], use_cache=False).logits[0].double() / 0.7
        logp_T = own_TV.log_softmax(-1)[5:-1].gather(1, row_T[6:, None])[:, 0]
        torch.testing.assert_close(done.logp_T.double(), logp_T, atol=CLOSE, rtol=0)


def test_a_long_answer_passes_many_windows_and_pieces_of_the_cache() -> None:
    """Decoding reads the cache in pieces; with a window, all keys of some pieces are out of it."""
    own = lender("starcoder2", max_position_embeddings=512)
    model = borrowed("starcoder2")
    engine = engine_zoo.engine(
        Borrowed(borrowed_shape(config_json("starcoder2") | {"max_position_embeddings": 512}),
                 model.lender), slots=4,
    )  # fmt: skip
    engine.source.model.resize(  # type: ignore[attr-defined]
        rehearsal.replace(model.config, max_positions=512)
    )
    asked = [engine_zoo.request(length, 1, number) for number, length in enumerate((2, 150))]
    groups = engine.generate(asked, Sampling(max_tokens=160))
    for request, (done,) in zip(asked, groups, strict=True):
        row_T = torch.tensor([*request.prompt, *done.token_ids])
        expected = own_logp(own, row_T)[len(request.prompt) - 1 :]
        torch.testing.assert_close(done.logp_T.double(), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name", ["gemma2", "gpt_oss", "phi", "qwen2_moe", "gpt2"])
def test_gradients_equal_transformers(name: str, recompute: bool) -> None:
    """Soft caps, sinks, a head with a bias, experts, a tied head; dropout of GPT-2 stays off."""
    model, own = borrowed(name), lender(name)
    model.recompute = recompute
    rows = sequences(LENGTHS[:3])
    own_loss = torch.zeros(())
    for row in rows:
        logits_TV = own(input_ids=row[None], use_cache=False).logits[0]
        own_loss = own_loss + logits_TV.log_softmax(-1)[:-1].gather(1, row[1:, None]).sum()
    own_loss.backward()
    torch.stack([logp_T.sum() for logp_T in packed_logp(model, rows)]).sum().backward()
    expected = dict(own.named_parameters())
    assert expected.keys() == dict(model.named_parameters()).keys()
    for key, parameter in model.named_parameters():
        assert parameter.grad is not None, key
        scale = float(expected[key].grad.abs().max()) + 1e-3
        gap = (parameter.grad - expected[key].grad).abs().max() / scale
        assert gap < 2e-5, f"{key}: {gap}"
    assert not any(module.training for module in model.modules() if module is not model)


@pytest.mark.parametrize("name", ["gemma2", "qwen2_moe", "gpt2", "phi"])
def test_saved_it_loads_in_transformers_and_here(name: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = borrowed(name)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.01)
    files = {"config.json": (folder(name) / "config.json").read_bytes()}
    save(model, tmp_path / "saved", files)
    (row,) = sequences([20])
    (before,) = packed_logp(model, [row])
    again, told = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", output_loading_info=True)
    assert not any(told.values())
    torch.testing.assert_close(before.double(), own_logp(again.eval(), row), atol=CLOSE, rtol=0)
    reloaded = load_weights(tmp_path / "saved")
    for key, tensor in reloaded.state_dict().items():
        assert torch.equal(tensor, model.state_dict()[key]), key
    raw = json.loads((tmp_path / "saved" / "config.json").read_bytes())
    kept = json.loads(files["config.json"])
    assert raw.get("attn_pdrop") == kept.get("attn_pdrop")  # dropout is off here, not in the file


def test_the_layers_of_groupwise_are_taken_where_they_fit(tmp_path: Path) -> None:
    from model_zoo import CONFIGS, make

    save(make("qwen3"), tmp_path / "own", {})
    assert isinstance(load_weights(tmp_path / "own"), Transformer)
    assert read_shape(CONFIGS["qwen3"]).native
    yarn = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64}
    assert not read_shape(CONFIGS["qwen2"] | {"rope_scaling": yarn}).native


def test_a_native_architecture_gives_the_same_with_borrowed_layers(tmp_path: Path) -> None:
    from model_zoo import hidden, make

    own = make("qwen3")
    save(own, tmp_path / "m", {})
    raw = json.loads((tmp_path / "m" / "config.json").read_bytes())
    lent = rehearsal.borrow_rehearsed(tmp_path / "m", raw, borrowed_shape(raw), None, "cpu")
    rows = sequences(LENGTHS)
    mine = lent(torch.cat(rows), packed_positions(LENGTHS), packed(LENGTHS))
    torch.testing.assert_close(mine, hidden(own, rows), atol=1e-4, rtol=1e-4)
    assert lent.config.counted == sum(p.numel() for p in own.parameters())


def test_the_text_part_of_a_model_for_images_is_trained_alone(tmp_path: Path) -> None:
    """Gemma 3 from 4B on has a tower for images: it is kept, and stays as it is."""
    own = image_model(tmp_path / "m")
    model = load_weights(tmp_path / "m")
    assert isinstance(model, Borrowed)
    rows = sequences(LENGTHS, vocabulary=90)
    found = packed_logp(model, rows)
    for row, logp_T in zip(rows, found, strict=True):
        torch.testing.assert_close(logp_T.double(), own_logp(own, row), atol=CLOSE, rtol=0)
    torch.cat(found).sum().backward()
    for key, parameter in model.named_parameters():
        assert (parameter.grad is None) == ("language_model" not in key), key
        assert parameter.requires_grad == ("language_model" in key)


def test_a_copy_is_a_model_of_its_own() -> None:
    """As references and copies of the sampler are made."""
    model = borrowed("gemma2")
    rows = sequences(LENGTHS)
    with torch.no_grad():
        before = torch.cat(packed_logp(model, rows))
        twin = copy.deepcopy(model)
        for parameter in model.parameters():
            parameter.add_(0.05)
        assert torch.equal(torch.cat(packed_logp(twin, rows)), before)
        assert not torch.equal(torch.cat(packed_logp(model, rows)), before)


def test_it_says_that_it_is_slower_with_a_figure() -> None:
    (note,) = equip(borrowed("gemma2"), exact=False)
    assert "gemma2 runs through transformers" in note and "tokens/s sampled" in note
    with pytest.raises(ModelError, match=r"engine\.exact needs groupwise's own layers"):
        equip(borrowed("gemma2"), exact=True)


# --- what is refused ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        ({"model_type": "mamba"}, "keeps a state besides keys and values"),
        ({"model_type": "qwen3_next"}, "linear_attention"),
        ({"model_type": "t5"}, "has an encoder"),
        ({"model_type": "bloom"}, "computes attention inside its own layers"),
        ({"model_type": "gpt9"}, "is unknown to transformers .*pip install -U transformers"),
        ({"model_type": "my_own", "auto_map": {"AutoModelForCausalLM": "x.Y"}}, "is never run"),
        (
            {"model_type": "gpt_oss", "quantization_config": {"quant_method": "mxfp4"}},
            r"quantised \(mxfp4\)",
        ),
    ],
)
def test_what_can_not_run_is_refused_from_its_configuration(
    raw: dict[str, Any], words: str, tmp_path: Path
) -> None:
    """There are no weights in the folder: nothing looks for them before."""
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ModelError, match=words):
        load_weights(tmp_path)


def test_heads_that_differ_from_layer_to_layer_are_refused_in_words() -> None:
    from transformers import CONFIG_MAPPING

    if "gemma4_text" not in CONFIG_MAPPING:
        pytest.skip("this version of transformers has no Gemma 4")
    raw = CONFIG_MAPPING["gemma4_text"]().to_dict()
    with pytest.raises(ModelError, match=r"'gemma4_text' have sizes that one cache can't hold"):
        read_shape(raw)


def test_without_transformers_the_command_that_installs_it_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ModelError, match=r"pip install .*transformers"):
        read_shape({"model_type": "gemma2"})


def test_layers_that_attend_twice_or_do_something_else_are_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model = borrowed("gemma2")
    text = model.lender.config
    monkeypatch.setattr(type(model), "head_rule", property(lambda self: rehearsal_rule(text)))
    with pytest.raises(ModelError, match="computes something else in a pack"):
        rehearsal.rehearse(model)
    monkeypatch.undo()
    layers = model.lender.model.layers
    layers[1].self_attn.layer_idx = 0
    with pytest.raises(ModelError, match="asked 3 times for attention"):
        rehearsal.rehearse(model)


def test_attention_with_something_unknown_is_refused_not_computed_without_it() -> None:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    module = borrowed("gemma2").lender.model.layers[0].self_attn
    heads = [torch.zeros(1, 2, 3, 4)] * 3
    with pytest.raises(ModelError, match="attends with slopes"):
        ALL_ATTENTION_FUNCTIONS["groupwise"](module, *heads, None, slopes=torch.ones(2))
    with pytest.raises(ModelError, match="a mask of its own making"):
        ALL_ATTENTION_FUNCTIONS["groupwise"](module, *heads, torch.zeros(1, 1, 3, 3))


def rehearsal_rule(_config: Any) -> Any:
    from groupwise.model.layers.head import HeadRule

    return HeadRule(cap=2.9)  # the model's is 3


def test_weights_that_are_missing_are_not_made_up(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    shutil.copytree(folder("olmo2"), tmp_path / "m")
    file = tmp_path / "m" / "model.safetensors"
    tensors = load_file(file)
    lost = tensors.pop("model.layers.1.mlp.up_proj.weight")
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"lacks model\.layers\.1\.mlp\.up_proj\.weight"):
        load_weights(tmp_path / "m")
    save_file(tensors | {"model.layers.1.mlp.up_proj.weight": lost, "extra": lost.clone()}, file,
              metadata={"format": "pt"})  # fmt: skip
    with pytest.raises(ModelError, match="holds extra"):
        load_weights(tmp_path / "m")


def test_positions_beyond_what_long_rope_keeps_apart_are_refused() -> None:
    """One long sequence would change the frequencies of all others in its batch."""
    rope = {
        "rope_type": "longrope",
        "short_factor": [1.0] * 6,
        "long_factor": [4.0] * 6,
        "original_max_position_embeddings": 32,
        "rope_theta": 1e4,
    }
    shape = read_shape(
        config_json("phi3") | {"rope_parameters": rope, "original_max_position_embeddings": 32}
    )
    assert shape.position_limit == 32
    with pytest.raises(ModelError, match="longer than 32"):
        shape.check_length(33)


def test_request_beyond_the_positions_of_gpt2_is_refused() -> None:
    engine = engine_zoo.engine(borrowed("gpt2"))
    with pytest.raises(Exception, match="limit of 128 positions"):
        engine.generate([Request((1,) * 120, 1, 0, 0)], Sampling(max_tokens=20))


def test_shared_prompts_with_a_window_ignore_what_lies_before_it() -> None:
    """Half of the prompt is out of the window of every answer's last tokens, to the bit."""
    model = borrowed("starcoder2")
    prompt, answer = sequences([20, 30])
    layer_reach = (WINDOW - 1) * model.config.num_layers

    def last(prompt_T: Tensor) -> Tensor:
        token_T = torch.cat((prompt_T, answer))
        attend = shared_prompts([20], [[30]])
        with torch.no_grad():
            return model(token_T, shared_positions([20], [[30]]), attend)[-1]

    assert 20 + 30 - 1 - layer_reach > 20  # the last token reaches no token of the prompt
    assert torch.equal(last(prompt), last(prompt.flip(0)))
