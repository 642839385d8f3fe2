"""A tokenizer of bytes with a chat template, and what a prompt becomes by it."""

from __future__ import annotations

from typing import Any

from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from groupwise.data.prompts import prepare
from groupwise.model.formats.tokenizer import Tokenizer
from groupwise.records import Task

CHAT = (
    "{{ bos_token }}{% for message in messages %}[{{ message['role'] }}]"
    "{{ message['content'] }}\n{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)


def tokenizer(template: str | None = CHAT, single: str = "<s> $A", **changes: Any) -> Tokenizer:
    """Bytes, with a BOS (256) that its post-processor writes in front of plain text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(t, special=True) for t in ("<s>", "</s>")])
    backend.add_special_tokens([AddedToken("<eats>", special=True, rstrip=True)])
    if "normalizer" in changes:
        backend.normalizer = changes["normalizer"]
    if single:
        backend.post_processor = processors.TemplateProcessing(
            single=single, pair=None, special_tokens=[("<s>", 256), ("</s>", 257)]
        )
    return Tokenizer(
        backend, eos_ids=[257], bos_id=256, template=template, names={"bos_token": "<s>"}
    )


def decoded(prompt: Any, model: Tokenizer | None = None, **settings: Any) -> str:
    model = model or tokenizer()
    frozen = prompt if isinstance(prompt, str) else tuple(prompt)
    found = prepare([Task(0, frozen)], model, **{"room": 1000, **settings})
    return model.decode(found.tasks[0].token_ids)
