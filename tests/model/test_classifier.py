"""Models that score, written as classifiers and read back: by us, by rm, prm and transformers."""

from __future__ import annotations

import json

import pytest
import torch
from family_zoo import folder as family_folder
from scorers import CHAT, folder_of, language_model, scores

from groupwise.errors import ModelError, RewardError
from groupwise.graders.parts import SampleToGrade
from groupwise.graders.scorers import prm, rm
from groupwise.model.adapters.lora import attach
from groupwise.model.adapters.targets import Spec
from groupwise.model.formats.checkpoint import load, load_weights
from groupwise.model.formats.classifier import (
    contents,
    is_classifier,
    kind_of,
    load_scalar_head,
    padded,
    save,
    with_score,
)
from groupwise.model.scalar_head import ScalarHead
from groupwise.records import Task

transformers = pytest.importorskip("transformers")
AUTOS = {
    "sequence": transformers.AutoModelForSequenceClassification,
    "token": transformers.AutoModelForTokenClassification,
}


def scorer(family="llama", **changes):
    loaded = padded(language_model(family, **changes))
    head = ScalarHead(loaded.model)
    torch.nn.init.normal_(head.score.weight, generator=torch.Generator().manual_seed(1))
    return head, loaded


def sample(text, prompt="ask: "):
    return SampleToGrade(Task(0, prompt), text, (), "eos")


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", ["sequence", "token"])
def test_transformers_and_we_read_the_same_numbers(tmp_path, family, tied, kind):
    head, loaded = scorer(family, tied=tied)
    save(head, tmp_path / "out", loaded.files, kind)
    again = load_scalar_head(tmp_path / "out")
    ids = [5, 9, 3, 20, 0]
    assert scores(again, ids) == scores(head, ids)  # to the bit
    theirs = AUTOS[kind].from_pretrained(tmp_path / "out").eval()
    with torch.no_grad():
        found = theirs(input_ids=torch.tensor([ids])).logits[0].flatten().tolist()
    mine = scores(head, ids)
    assert found == pytest.approx(mine if kind == "token" else mine[-1:], abs=1e-5)
    assert is_classifier(tmp_path / "out") and kind_of(tmp_path / "out") == kind
    assert not any("lm_head" in name for name in theirs.state_dict())


def test_padding_is_no_end_and_a_batch_is_read_at_the_end(tmp_path):
    head, loaded = scorer()
    save(head, tmp_path / "out", loaded.files, "sequence")
    config = json.loads((tmp_path / "out" / "config.json").read_bytes())
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert config["pad_token_id"] == tokenizer.pad_token_id != tokenizer.eos_token_id
    assert config["vocab_size"] == config["pad_token_id"] + 1 == head.trunk.config.vocab_size
    theirs = AUTOS["sequence"].from_pretrained(tmp_path / "out").eval()
    pad = config["pad_token_id"]
    rows, mask = [[5, 9, 0, pad, pad], [7, 7, 8, 6, 0]], [[1, 1, 1, 0, 0], [1] * 5]
    with torch.no_grad():
        found = theirs(input_ids=torch.tensor(rows), attention_mask=torch.tensor(mask)).logits
    expected = [scores(head, [5, 9, 0])[-1], scores(head, rows[1])[-1]]
    assert found[:, 0].tolist() == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("template", [None, CHAT])
def test_rm_reads_at_the_end_token_which_it_appends(tmp_path, template):
    head, loaded = scorer(template=template)
    save(head, tmp_path / "out", loaded.files, "sequence")
    said = "ask: " if template is None else "[user]ask: [assistant]"
    expected = scores(head, [*loaded.tokenizer.encode(said + "yes"), 0])[-1]
    for text in ("yes<end>", "yes"):
        (mark,) = rm(("<end>",), path=str(tmp_path / "out")).grade([sample(text)])
        assert mark.value == pytest.approx(expected, abs=1e-5)
    (less,) = rm((), path=str(tmp_path / "out"), minus=0.25).grade([sample("yes")])
    assert less.value == pytest.approx(expected - 0.25, abs=1e-5)
    with pytest.raises(RewardError, match="minus"):
        rm((), path=str(tmp_path / "out"), minus="a")


def test_prm_reads_behind_each_separator(tmp_path):
    head, loaded = scorer()
    save(head, tmp_path / "out", loaded.files, "token")
    every = scores(head, loaded.tokenizer.encode("ask: one\n\ntwo\n\n"))
    expected = torch.tensor([every[9], every[14]]).sigmoid().tolist()
    part = prm((), path=str(tmp_path / "out"), process=True)
    (mark,) = part.grade([sample("one\n\ntwo")])
    assert [score for _, score in mark.steps] == pytest.approx(expected, abs=1e-5)


def test_a_run_folder_stands_for_its_best_checkpoint(tmp_path):
    head, loaded = scorer()
    save(head, tmp_path / "run" / "checkpoints" / "best", loaded.files, "sequence")
    whole = rm((), path=str(tmp_path / "run")).grade([sample("a")])
    assert whole == rm((), path=str(tmp_path / "run/checkpoints/best")).grade([sample("a")])


def test_a_language_model_gives_its_layers_and_a_score_of_0(tmp_path):
    folder = folder_of(tmp_path / "lm", tied=False)
    head = load_scalar_head(folder)
    assert scores(head, [1, 2, 3]) == [0.0, 0.0, 0.0]
    # The head over the vocabulary is not even held.
    assert {name for name, _ in head.learning_parameters()} == dict(head.named_parameters()).keys()
    whole = dict(load_weights(folder).named_parameters())
    assert all(torch.equal(x, whole[n]) for n, x in head.trunk.named_parameters())


def test_an_unused_special_token_pads_before_a_new_one_is_made():
    loaded = language_model()
    backend = loaded.tokenizer.backend
    raw = json.loads(backend.to_str())
    raw["added_tokens"].append(raw["added_tokens"][0] | {"id": 1, "content": "<|reserved_7|>"})
    raw["model"]["vocab"]["<|reserved_7|>"] = raw["model"]["vocab"].pop("a")
    files = loaded.files | {"tokenizer.json": json.dumps(raw).encode()}
    found = padded(type(loaded)(loaded.model, loaded.tokenizer.from_files(files), files))
    assert found.tokenizer.pad_id == 1
    assert found.model.config.vocab_size == len(found.tokenizer) == len(loaded.tokenizer)
    again = padded(found)  # and that is kept
    assert again.tokenizer.pad_id == 1 and again.files == found.files


def test_what_is_refused(tmp_path):
    head, loaded = scorer()
    for labels, words in ((2, "2 labels"), (1, "width 16")):
        wrong = torch.nn.Linear(32 if labels == 2 else 16, labels, bias=False)
        head.score = wrong
        save(head, tmp_path / str(labels), loaded.files, "sequence")
        with pytest.raises(ModelError, match=words):
            load_scalar_head(tmp_path / str(labels))
    head, loaded = scorer()
    save(head, tmp_path / "rm", loaded.files, "sequence")
    with pytest.raises(ModelError, match="classifier, which scores texts and writes none"):
        load(tmp_path / "rm")
    with pytest.raises(ModelError, match="padding other than"):
        contents(head, language_model().files, "sequence")


def test_layers_of_transformers_are_refused():
    with pytest.raises(ModelError, match="gpt2, which runs with transformers' layers"):
        load_scalar_head(family_folder("gpt2"))


def test_an_adapter_keeps_its_score_beside_it(tmp_path):
    folder = folder_of(tmp_path / "lm", tied=False)
    loaded = padded(load(folder, head=False))
    attach(loaded.model, Spec(4, 8.0, "all", False), seed=0)
    head = with_score(loaded.model, folder)
    torch.nn.init.normal_(head.score.weight)
    for name, parameter in loaded.model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    learning = {name for name, _ in head.learning_parameters()}
    assert "score.weight" in learning and all("lora" in n for n in learning - {"score.weight"})
