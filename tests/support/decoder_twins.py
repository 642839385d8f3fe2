"""The GPU's decoder without a GPU: its kernels replaced by twins in plain PyTorch."""

from __future__ import annotations

import pytest
import torch
from engine_zoo import engine
from model_zoo import make

from groupwise.engine.native.engine import NativeEngine
from groupwise.model.layers.ops import Plain
from groupwise.model.layers.transformer import Transformer


class Twins(Plain):
    """Poses as a model with kernels; the decoder's own are replaced by `twins`."""

    name = "fast"


@pytest.fixture
def twins(monkeypatch: pytest.MonkeyPatch) -> None:
    """The decoder's three kernels in plain PyTorch: the interpreter takes seconds a token."""
    from groupwise.engine.native import decoder
    from groupwise.engine.native import gpu_scheduler as inflight
    from groupwise.engine.native.drawing import draw_plain
    from groupwise.model.kernels.record import record_plain

    flights: list[inflight.GpuScheduler] = []
    tell = inflight.GpuScheduler._tell_device

    def tell_and_note(flight: inflight.GpuScheduler) -> None:
        flights.append(flight)
        tell(flight)

    def sample(hidden_BD, head_VD, key_B4, position_B, inverse_temperature, **options):
        logits_BV = hidden_BD @ head_VD.T * inverse_temperature
        return draw_plain(logits_BV, key_B4, position_B, **options)

    def prompt_attention(layer, query_BHW, key_heads, tile_I4, layout):
        """Notes only which row read what."""
        assert key_heads * 3 == query_BHW.shape[1] and int(tile_I4[:, 1].sum()) == len(query_BHW)
        return {
            row: (prompt, length)
            for start, rows, prompt, length in tile_I4.tolist()
            for row in range(start, start + rows)
        }

    def decode_attention(
        layer, query_BHW, key_BJW, value_BJW, slot_B, own_S, prompt_S, length_S, *rest
    ):
        first = rest[-1]
        own, prompts = flights[-1].cache, flights[-1].prompts
        seen = []
        for row, slot in enumerate(slot_B.tolist()):
            at, prompt, length = int(own_S[slot]), int(prompt_S[slot]), int(length_S[slot])
            assert first is None or first[row] == (prompt, length)
            own.key_LSJUW[layer, slot, :, at] = key_BJW[row]
            own.value_LSJUW[layer, slot, :, at] = value_BJW[row]
            key_JUW, value_JUW = (
                torch.cat((a[layer, prompt, :, :length], b[layer, slot, :, : at + 1]), 1)
                for a, b in (
                    (prompts.key_LSJUW, own.key_LSJUW),
                    (prompts.value_LSJUW, own.value_LSJUW),
                )
            )
            many = query_BHW.shape[1] // len(key_JUW)
            key_HUW, value_HUW = (x.repeat_interleave(many, 0) for x in (key_JUW, value_JUW))
            score_HU = torch.einsum("hw,huw->hu", query_BHW[row], key_HUW)
            weight_HU = (score_HU / key_HUW.shape[-1] ** 0.5).softmax(-1)
            seen.append(torch.einsum("hu,huw->hw", weight_HU, value_HUW))
        return torch.stack(seen)

    monkeypatch.setattr(inflight.GpuScheduler, "_tell_device", tell_and_note)
    monkeypatch.setattr(decoder, "sample", sample)
    monkeypatch.setattr(decoder, "record", record_plain)
    monkeypatch.setattr(decoder, "decode_attention", decode_attention)
    monkeypatch.setattr(decoder, "prompt_attention", prompt_attention)


def twin(name: str = "smollm2") -> Transformer:
    model = make(name)
    model.ops = Twins()
    return model


def decoder_engine(**options: object) -> NativeEngine:
    return engine(twin(), **options)
