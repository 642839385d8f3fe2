"""A policy whose layers are transformers' own: any architecture behind the same interface.

transformers computes everything but attention and the head. Its layers hand queries, keys and
values to an attention function that goes by a name; ours passes them on to the caller's `Attend`,
so packs, shared prompts and caches are the same as with groupwise's own layers. Parameters keep
transformers' names, so `state_dict()` is the checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from groupwise.errors import ModelError, in_short
from groupwise.model.borrowed.families import make_config, model_class, quiet, text_part
from groupwise.model.config import ModelConfig
from groupwise.model.layers.attention import Attend
from groupwise.model.layers.attention_rule import AttentionRule
from groupwise.model.layers.head import HeadRule
from groupwise.model.layers.routes import Routes
from groupwise.model.layers.transformer import Policy, check_pack, computed_again

NAME = "groupwise"  # of our attention function, among transformers' own
# What layers hand to it that says nothing new: dropout is 0, a window is in the mask as well.
WITHOUT_EFFECT = {
    "cache_position",
    "dropout",
    "is_causal",
    "output_attentions",
    "past_key_values",
    "position_ids",
    "sliding_window",
    "use_cache",
}

_attend: ContextVar[Attend] = ContextVar("attend")


@contextmanager
def attending(attend: Attend) -> Iterator[None]:
    """Let our attention function call this one within the block."""
    token = _attend.set(attend)
    try:
        yield
    finally:
        _attend.reset(token)


def _attention(
    module: Any,
    query_1HTW: Tensor,
    key_1JTW: Tensor,
    value_1JTW: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attend as transformers' layers ask for it."""
    unknown = [name for name, x in others.items() if name not in WITHOUT_EFFECT and x is not None]
    if unknown:
        raise ModelError(
            f"{type(module).__name__} attends with {', '.join(unknown)}, which is not known here "
            "and may change what it computes. Use another model."
        )
    if attention_mask is not None and attention_mask.numel() != 1:
        raise ModelError(
            f"{type(module).__name__} attends with a mask of its own making, which would not hold "
            "in a pack. Use another model."
        )
    window = None if attention_mask is None else int(attention_mask)
    rule = AttentionRule(scale=scaling, window=window, cap=softcap, sink_H=s_aux)
    query_THW, key_TJW, value_TJW = (
        x[0].transpose(0, 1) for x in (query_1HTW, key_1JTW, value_1JTW)
    )
    seen_THW = _attend.get()(module.layer_idx, query_THW, key_TJW, value_TJW, rule)
    return seen_THW[None], None


def _mask(*, local_size: int | None = None, **ignored: Any) -> Tensor | None:
    """Hand on only the window of a layer's mask; the caller decides who sees whom."""
    return None if local_size is None else torch.tensor(local_size).view(1, 1, 1, 1)


def _register() -> None:
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(NAME, _attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, _mask)


class Borrowed(Policy):
    """`lender` is the model in transformers; its children are this module's children, too."""

    lender: Any

    def __init__(self, config: ModelConfig, lender: Any) -> None:
        super().__init__(config)
        self.__dict__["lender"] = lender.eval()  # no child: names would begin with it
        for name, child in lender.named_children():
            self.add_module(name, child)
        self._freeze_the_rest()

    def resize(self, config: ModelConfig) -> None:
        """Take the sizes that a rehearsal has seen."""
        self._config = config

    def _freeze_the_rest(self) -> None:
        """Freeze what a text never reaches, such as a tower for images."""
        reached = {id(p) for p in self.body.parameters()}
        reached |= {id(p) for p in self.lender.get_output_embeddings().parameters()}
        for parameter in self.parameters():
            if id(parameter) not in reached:
                parameter.requires_grad_(False)

    @property
    def body(self) -> nn.Module:
        decoder: nn.Module = self.lender.get_decoder()
        return decoder

    @property
    def head_weight(self) -> Tensor:
        weight: Tensor = self.lender.get_output_embeddings().weight
        return weight

    @property
    def head_rule(self) -> HeadRule:
        part = text_part(self.lender.config)
        scale = getattr(part, "logit_scale", None) or 1.0
        scale /= getattr(part, "logits_scaling", None) or 1.0
        cap = getattr(part, "final_logit_softcapping", None)
        return HeadRule(
            float(scale), cap, getattr(self.lender.get_output_embeddings(), "bias", None)
        )

    def hidden(
        self, token_T: Tensor, position_T: Tensor, attend: Attend, routes: Routes | None = None
    ) -> Tensor:
        check_pack(self.config, token_T, position_T)
        if routes is not None:
            raise ModelError(
                f"{self.config.family} runs through transformers, whose layers do not say which "
                "experts a token visits, nor take them from a record. Use a mixture that runs "
                "natively: Qwen3-MoE, OLMoE, Mixtral."
            )
        with attending(attend), self._recomputing():
            found = self.body(
                input_ids=token_T[None], position_ids=position_T[None], use_cache=False
            )
        hidden_TD: Tensor = found.last_hidden_state[0]
        return hidden_TD

    @contextmanager
    def _recomputing(self) -> Iterator[None]:
        """Recompute transformers' layers, which do so while `training`; nothing else in them is."""
        from transformers.modeling_layers import GradientCheckpointingLayer

        layers = [x for x in self.modules() if isinstance(x, GradientCheckpointingLayer)]
        chosen = [
            layer
            for index, layer in enumerate(layers)
            if torch.is_grad_enabled() and computed_again(index, self.recompute)
        ]
        for layer in chosen:
            layer.gradient_checkpointing = layer.training = True
            layer.__dict__["_gradient_checkpointing_func"] = _recomputed
        try:
            yield
        finally:
            for layer in chosen:
                layer.gradient_checkpointing = layer.training = False

    def stored(self, dtype: torch.dtype | None) -> dict[str, Tensor]:
        """Return the weights that a file holds, each once."""
        return {
            name: x.detach().to(dtype or x.dtype)
            for name, x in self.lender.state_dict().items()
            if name not in self.lender.all_tied_weights_keys
        }

    def write(self, folder: Path, state: dict[str, Tensor], *, shard_bytes: int) -> None:
        """Write weights as the architecture's files have them, which other programs read."""
        with quiet():
            self.lender.save_pretrained(folder, state_dict=state, max_shard_size=shard_bytes)


def _recomputed(layer: Callable[..., Any], *given: Any) -> Any:
    """Run `checkpoint`, with the attention of this pass also when it runs again."""
    attend = _attend.get()

    def run(*again: Any) -> Any:
        with attending(attend):
            return layer(*again)

    return checkpoint(run, *given, use_reentrant=False)


def borrow(
    folder: Path,
    raw: dict[str, Any],
    shape: ModelConfig,
    dtype: torch.dtype | None,
    device: torch.device | str,
) -> Borrowed:
    """Load a folder's model with transformers' layers; rehearse it before use (rehearsal.py)."""
    config = make_config(raw)
    kind = model_class(config)
    _register()
    with quiet():
        try:
            lender, told = kind.from_pretrained(
                folder,
                config=config,
                dtype=dtype or "auto",
                attn_implementation=NAME,
                local_files_only=True,
                use_safetensors=True,
                output_loading_info=True,
            )
        except ModelError:
            raise
        except Exception as error:  # files can be wrong in more ways than can be listed
            raise ModelError(
                f"transformers can't load {folder} as {kind.__name__}: {in_short(error)}. Fetch "
                "the checkpoint again; if it stays, the architecture is not what config.json says."
            ) from error
    _check_loaded(folder, told)
    return Borrowed(shape, lender.to(device))


def _check_loaded(folder: Path, told: dict[str, Any]) -> None:
    """Refuse missing weights: transformers would go on with random ones in their place."""
    words = {
        "missing_keys": "lacks {} that config.json asks for",
        "mismatched_keys": "holds {} in other shapes than config.json asks for",
        "unexpected_keys": "holds {}, which this architecture does not have",
    }
    for key, text in words.items():
        names = sorted(str(x[0]) if isinstance(x, tuple) else str(x) for x in told.get(key) or ())
        if names:
            shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if names[4:] else "")
            raise ModelError(
                f"{folder} {text.format(shown)}. Weights and config.json belong to different "
                "models; fetch both again."
            )
