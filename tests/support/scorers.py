"""Small models that score, and the folders of the language models that they start from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from groupwise.model.config import ModelConfig
from groupwise.model.formats.checkpoint import Loaded, save
from groupwise.model.formats.tokenizer import Tokenizer, character_files
from groupwise.model.layers.attention import packed, packed_positions
from groupwise.model.layers.transformer import Transformer
from groupwise.model.scalar_head import ScalarHead

LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789 .,:?!+=-\n[]"
SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "eos_token_id": 0,
}
CHAT = (
    "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def language_model(
    family: str = "llama",
    *,
    tied: bool = True,
    template: str | None = None,
    seed: int = 0,
    letters: str = LETTERS,
    positions: int = 128,
) -> Loaded:
    """Return a random model that reads characters, with its end token as its padding."""
    files = character_files(letters)
    if template is not None:
        files["chat_template.jinja"] = template.encode()
    tokenizer = Tokenizer.from_files(files)
    raw = SIZES | {"model_type": family, "vocab_size": len(tokenizer), "tie_word_embeddings": tied}
    raw["max_position_embeddings"] = positions
    files["config.json"] = json.dumps(raw).encode()
    model = Transformer(ModelConfig.from_hf(raw))
    model.initialise(torch.Generator().manual_seed(seed), std=0.2)
    return Loaded(model, tokenizer, files)


def folder_of(path: Path, **changes: Any) -> Path:
    """Write such a model as a folder."""
    made = language_model(**changes)
    save(made.model, path, made.files)
    return path


@torch.no_grad()
def scores(head: ScalarHead, ids: list[int]) -> list[float]:
    """Return the number at every token of one text."""
    every = torch.arange(len(ids))
    found = head(torch.tensor(ids), packed_positions([len(ids)]), packed([len(ids)]), every)
    return list(map(float, found))
