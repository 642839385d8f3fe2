"""Text and ids, the chat template applied once, and every end-of-sequence id."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from groupwise.errors import ModelError
from groupwise.model.formats.tokenizer import Tokenizer as Ours
from groupwise.model.formats.tokenizer import character_files

CHATML = (
    "{% for message in messages %}<s>{{ message['role'] }}\n{{ message['content'] }}</s>\n"
    "{% endfor %}{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)


def files(template: Any = CHATML, **generation: Any) -> dict[str, bytes]:
    """Byte-level BPE without merges, with a BOS that its post-processor adds."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = ["<s>", "</s>", "<|eot|>", "<pad>"]
    backend.add_special_tokens([AddedToken(token, special=True) for token in special])
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair=None, special_tokens=[("<s>", 256)]
    )
    backend.enable_truncation(5)
    backend.enable_padding(length=64)
    settings = {
        "bos_token": {"__type": "AddedToken", "content": "<s>", "lstrip": False},
        "eos_token": "</s>",
        "pad_token": "<pad>",
        "chat_template": template,
    }
    return {
        "tokenizer.json": backend.to_str().encode(),
        "tokenizer_config.json": json.dumps(settings).encode(),
        "generation_config.json": json.dumps(generation).encode(),
    }


TEXTS = ["", " ", "a  b\n\n\tc", "naïve café 日本語 🙂", "<s>not alone</s>", "x" * 200]


@pytest.mark.parametrize("text", TEXTS)
def test_text_survives_the_round_trip(text: str) -> None:
    tokenizer = Ours.from_files(files())
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.encode(text, with_bos=True) == [256, *ids]
    # Neither cut to 5 nor padded to 64, whatever tokenizer.json was saved with.
    assert text.startswith("<s>") or len(ids) == len(text.encode())


def test_special_ids_from_every_place() -> None:
    tokenizer = Ours.from_files(files(eos_token_id=[258, 257]))
    assert tokenizer.eos_ids == (258, 257)
    assert (tokenizer.bos_id, tokenizer.pad_id) == (256, 259)
    alone = Ours.from_files(files())
    assert alone.eos_ids == (257,)
    config = {"config.json": b'{"eos_token_id": 258}'}
    assert Ours.from_files(files(eos_token_id=257) | config).eos_ids == (257, 258)
    assert len(alone) == 260


def test_the_template_is_applied_once_and_never_to_strings() -> None:
    tokenizer = Ours.from_files(files())
    messages = [{"role": "user", "content": "hi"}]
    text = "<s>user\nhi</s>\n<s>assistant\n"
    assert tokenizer.render(messages) == text
    assert tokenizer.render(messages, to_continue=False) == "<s>user\nhi</s>\n"
    ids = tokenizer.prompt(messages)
    assert tokenizer.decode(ids) == text and ids.count(256) == 2  # no further BOS in front
    assert tokenizer.decode(tokenizer.prompt("hi")) == "<s>hi"
    assert tokenizer.prompt(text).count(256) == 3  # a string is only text: template not applied


def test_templates_see_what_transformers_shows_them() -> None:
    template = (
        "{{ bos_token }}{% for m in messages %}{% if loop.index0 > 0 %}{% break %}{% endif %}"
        "{{ m | tojson }}{% endfor %}{% if tools %}T{% endif %}{{ extra }}"
        "{% generation %}g{% endgeneration %}"
        "{{ strftime_now('%Y') if strftime_now is defined else 'a fixed date' }}"
    )
    tokenizer = Ours.from_files(files(template))
    messages = [{"role": "user", "content": "é<"}, {"role": "user", "content": "no"}]
    found = tokenizer.render(messages, extra="E")
    assert found == '<s>{"role": "user", "content": "é<"}Ega fixed date'


def test_templates_in_every_place() -> None:
    messages = [{"role": "user", "content": "x"}]
    several = [
        {"name": "tool_use", "template": "no"},
        {"name": "default", "template": "yes"},
    ]
    assert Ours.from_files(files(several)).render(messages) == "yes"
    beside = files(None) | {"chat_template.jinja": b"beside"}
    assert Ours.from_files(beside).render(messages) == "beside"
    copied = files("beside\n") | {"chat_template.jinja": b"beside"}
    assert Ours.from_files(copied).render(messages).strip() == "beside"
    old = files(None) | {"chat_template.json": b'{"chat_template": "old"}'}
    assert Ours.from_files(old).render(messages) == "old"


def test_two_templates_that_disagree_are_refused_by_their_files() -> None:
    messages = [{"role": "user", "content": "x"}]
    two = Ours.from_files(files("one") | {"chat_template.jinja": b"other"})
    assert two.decode(two.prompt("plain text")) == "<s>plain text"  # which needs none
    with pytest.raises(
        ModelError, match=r"tokenizer_config\.json and chat_template\.jinja hold different"
    ):
        two.render(messages)
    named = [{"name": "tool_use", "template": "a"}, {"name": "rag", "template": "b"}]
    with pytest.raises(ModelError, match=r"by name \(rag, tool_use\), and none is called default"):
        Ours.from_files(files(named)).render(messages)


def test_special_names_of_old_folders() -> None:
    """Where tokenizer_config.json says nothing, special_tokens_map.json does."""
    made = files()
    settings = json.loads(made["tokenizer_config.json"])
    old = {key: settings.pop(key) for key in list(settings) if key.endswith("_token")}
    made["tokenizer_config.json"] = json.dumps(settings).encode()
    made["special_tokens_map.json"] = json.dumps(old).encode()
    assert Ours.from_files(made).eos_ids == Ours.from_files(files()).eos_ids != ()


def test_renders_as_transformers_does(tmp_path: Any) -> None:
    transformers = pytest.importorskip("transformers")
    for name, content in files().items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "1 + 1\n= ?"},
    ]
    expected = theirs.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert Ours.from_files(files()).render(messages) == expected


def test_one_token_a_character() -> None:
    tokenizer = Ours.from_files(character_files("0123456789+=\n "))
    ids = tokenizer.encode("12+3= 15\n<end>")
    assert ids == [2, 3, 11, 4, 12, 14, 2, 6, 13, 0]
    assert tokenizer.decode(ids) == "12+3= 15\n<end>"
    assert tokenizer.eos_ids == (0,) and len(tokenizer) == 15
    with pytest.raises(ModelError, match="can't encode '1é'"):
        tokenizer.encode("1é")


def test_bad_input_is_refused() -> None:
    user = {"role": "user", "content": "x"}
    with pytest.raises(ModelError, match=r"no tokenizer\.json"):
        Ours.from_files({})
    with pytest.raises(ModelError, match=r"tokenizer\.json can't be read"):
        Ours.from_files({"tokenizer.json": b"{}"})
    with pytest.raises(ModelError, match=r"generation_config\.json can't be read: it is no"):
        Ours.from_files(files() | {"generation_config.json": b"{"})
    with pytest.raises(ModelError, match="id 999 is outside the vocabulary of 260"):
        Ours.from_files(files(eos_token_id=999))
    with pytest.raises(ModelError, match="no chat template"):
        Ours.from_files(files(None)).render([user])
    with pytest.raises(ModelError, match="no message"):
        Ours.from_files(files()).render(["x"])  # type: ignore[list-item]
    strict = "{{ raise_exception('only one turn') if messages | length > 1 }}"
    with pytest.raises(ModelError, match=r"\['user', 'user'\]: only one turn"):
        Ours.from_files(files(strict)).render([user, user])
    reaching = "{{ messages.__class__.__mro__ }}"
    with pytest.raises(ModelError, match="unsafe"):
        Ours.from_files(files(reaching)).render([user])
