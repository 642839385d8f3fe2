"""The embedded model: a small transformer over characters, cold-started on the spot.

A policy that never gives a right answer has nothing to learn from. A short supervised course on
solutions of the training tasks gives it a start; reinforcement does the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from groupwise import config
from groupwise.common.progress import phase
from groupwise.errors import DataError
from groupwise.model.config import ModelConfig
from groupwise.model.formats.checkpoint import Loaded
from groupwise.model.formats.tokenizer import Tokenizer, character_files
from groupwise.model.layers.transformer import Transformer
from groupwise.optim.adamw import AdamW
from groupwise.optim.packs import Sequences, outputs, pack
from groupwise.optim.step import apply
from groupwise.records import Task

WARMUP, MEMORY = 50, 0.9  # of the cold start: steps, weight of the past in an average


def make(
    tiny: config.Tiny, tasks: Sequence[Task], held_out: Sequence[Task], longest: int, seed: int
) -> Loaded:
    """A model whose alphabet is that of all tasks, cold-started on those that it trains on."""
    if not tasks or any("solution" not in task.columns for task in tasks):
        raise DataError(
            'model.path = "tiny" is taught on solutions first, which these tasks do not have. Use '
            'a generator (data.train = "arithmetic" or "countdown"), add a column \'solution\', '
            "or set model.path to a model."
        )
    pairs = [(str(task.prompt), str(task.columns["solution"])) for task in tasks]
    texts = [text for pair in pairs for text in pair] + [str(task.prompt) for task in held_out]
    alphabet = "".join(sorted(set("".join(texts))))
    files = character_files(alphabet)
    tokenizer = Tokenizer.from_files(files)
    room = max(len(str(task.prompt)) for task in [*tasks, *held_out]) + longest
    shape = ModelConfig.from_hf(hugging_face_config(tiny, len(tokenizer), room))
    generator = torch.Generator().manual_seed(seed)
    model = Transformer(shape).initialise(generator)
    with phase("cold start", things="steps") as told:
        _teach(model, tokenizer, pairs, tiny, generator, told)
    return Loaded(model, tokenizer, files)


def hugging_face_config(tiny: config.Tiny, vocabulary: int, room: int) -> dict[str, object]:
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": vocabulary,
        "hidden_size": tiny.width,
        "intermediate_size": tiny.width * 3,
        "num_hidden_layers": tiny.layers,
        "num_attention_heads": tiny.heads,
        "num_key_value_heads": tiny.heads,
        "max_position_embeddings": max(room, 16),
        "rms_norm_eps": 1e-6,
        "rope_theta": 10_000.0,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
        "eos_token_id": 0,
        "bos_token_id": None,
    }


def _teach(
    model: Transformer,
    tokenizer: Tokenizer,
    pairs: Sequence[tuple[str, str]],
    tiny: config.Tiny,
    generator: torch.Generator,
    told: Callable[[int], None],
) -> None:
    """Cross-entropy on solution and end token, until samples would be right often enough.

    When that is varies with the last bits of the arithmetic, so a number of steps would start
    another run from another policy on every kind of machine.
    """
    optimizer = AdamW(
        model.named_parameters(),
        learning_rate=tiny.cold_start_rate,
        beta1=0.9,
        beta2=0.95,
        eps=1e-8,
        weight_decay=0.0,
    )
    end = (tokenizer.eos_ids[0],)
    right = 0.0  # probability of the whole solution, averaged over recent batches
    for step in range(tiny.cold_start_steps):
        told(step)
        drawn = torch.randint(len(pairs), (tiny.cold_start_batch,), generator=generator).tolist()
        batch = Sequences(
            [tuple(tokenizer.prompt(pairs[i][0])) for i in drawn],
            [tuple(tokenizer.encode(pairs[i][1])) + end for i in drawn],
        )
        part = pack(batch, range(len(drawn)), batch.width)
        logp_NT = outputs(model, part, temperature=1.0)["logp_NT"]
        right = MEMORY * right + (1 - MEMORY) * float(logp_NT.detach().sum(1).exp().mean())
        if right >= tiny.cold_start_accuracy:
            return
        (-logp_NT.sum() / part.mask_NT.sum()).backward()  # type: ignore[no-untyped-call]
        apply(
            model.named_parameters(),
            optimizer,
            clip_norm=1.0,
            learning_rate=tiny.cold_start_rate * min(1.0, (step + 1) / WARMUP),
        )
