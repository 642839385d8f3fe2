"""The word of a case that chooses between slots: `mode`, `level`, `action`, ... by method."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from groupwise.errors import CaseError, nearest
from groupwise.groups import advantages
from groupwise.losses import (
    corrections,
    distribution_gates,
    gates,
    group_terms,
    penalties,
    ratios,
    update_gates,
    weight_gates,
)
from groupwise.methods.composition import Recipe

Params = Mapping[str, Any]
WORDS: dict[str, tuple[str, ...]] = {  # that choose, beside those of the slots chosen
    "vespo": ("anchor",),
    "dro": ("level", "anchor", "beta"),
    "kimi15": ("level", "anchor", "beta"),
    "topr": ("ratio",),
    "rec": ("mode", "outer_low", "outer_high", "weight"),
    "outlier_mask": ("level", "low", "high"),
    "fipo": ("high_only",),
    "decoupled_ppo": ("action", "low", "high"),
    "prime_rl": ("mask", "drift", "delta_low", "delta_high"),
    "prime_rl_ipo": ("mask", "drift", "delta_low", "delta_high"),
    "tinker_importance_sampling": ("loss", "low", "high"),
    "tinker_ppo": ("loss", "low", "high"),
    "tinker_cispo": ("loss", "low", "high"),
    "chord": ("mu", "phi"),
    "sdpo": ("is_cap",),
    "gdpo": ("whiten", "whiten_eps"),
    "otb": ("zero_tail",),
    "m2po": ("floor_low", "floor_high"),
    "vineppo": ("whiten_eps_in_var",),
}


def variant(made: Recipe, params: Params, inputs: Params) -> Recipe:
    """Return the recipe that a case means: its own, with the slots that the words choose."""
    change = _CHANGES.get(made.name)
    made = made if change is None else made.replace(**change(made, params))
    if "rollout_is_weights" in inputs and "weighing" in made.advantage[0]:
        made = made.replace(advantage=(made.advantage[0].replace(weighing="sampler"),))
    return made


def _pick(known: Mapping[str, Any], params: Params, word: str, default: str) -> Any:
    chosen = params.get(word, default)
    if chosen not in known:
        raise CaseError(f"{word}={chosen!r} is unknown. {nearest(str(chosen), known)}")
    return known[chosen]


def _vespo(made: Recipe, params: Params) -> dict[str, Any]:
    return {"ratio": made.ratio.replace(anchor=params.get("anchor", "old"))}


def _drift(made: Recipe, params: Params) -> dict[str, Any]:
    known = {"token": penalties.proximal, "sequence": penalties.proximal_sequence}
    own = "sequence" if made.name == "kimi15" else "token"
    chosen = _pick(known, params, "level", own)
    words = {key: params[key] for key in ("beta", "anchor") if key in params}
    return {"penalty": (chosen(**words),)}


def _topr(made: Recipe, params: Params) -> dict[str, Any]:
    known = {"token": ratios.token, "sequence": ratios.sequence_product}
    return {"ratio": _pick(known, params, "ratio", "sequence")()}


def _rec(made: Recipe, params: Params) -> dict[str, Any]:
    known = {
        "band": weight_gates.score_band,
        "one-side": weight_gates.score_one_side,
        "ring": weight_gates.score_ring,
    }
    slot = _pick(known, params, "mode", "ring")()
    words = {"eps_low": "low", "eps_high": "high", "outer_low": "outer_low",
             "outer_high": "outer_high", "weight": "weight"}  # fmt: skip
    changes = {own: params[key] for key, own in words.items() if key in params and own in slot}
    return {"gate": slot.replace(**changes)}


def _outlier(made: Recipe, params: Params) -> dict[str, Any]:
    known = {"sequence": corrections.mask_outliers, "token": corrections.mask_token}
    chosen = _pick(known, params, "level", "sequence")
    words = {key: params[key] for key in ("low", "high") if key in params}
    return {"correction": (chosen(**words),)}


def _fipo(made: Recipe, params: Params) -> dict[str, Any]:
    slot = made.correction[0]
    below = 0.0 if params.get("high_only", True) else params.get("range", slot["above"])
    words = {"half_life": "half_life", "range": "above", "safety": "safety", "dual": "dual"}
    changes = {own: params[key] for key, own in words.items() if key in params}
    return {"correction": (slot.replace(below=below, **changes),)}


def _decoupled(made: Recipe, params: Params) -> dict[str, Any]:
    known = {"mask": corrections.icepop, "clamp": corrections.tis_clamped}
    chosen = _pick(known, params, "action", "mask")
    words = {key: params[key] for key in ("low", "high") if key in params}
    return {"correction": (chosen(**words),)}


def _prime_rl(made: Recipe, params: Params) -> dict[str, Any]:
    own = "symmetric" if made.name == "prime_rl_ipo" else "one_sided"
    known = {
        "one_sided": distribution_gates.tv_one_sided(
            low=params.get("delta_low", 0.2), high=params.get("delta_high", 0.2)
        ),
        "symmetric": distribution_gates.tv_symmetric(delta=params.get("delta_high", 0.1)),
    }
    return {
        "gate": _pick(known, params, "mask", own),
        "penalty": (penalties.drift(coef=params.get("drift", 1e-3)),),
    }


def _tinker(made: Recipe, params: Params) -> dict[str, Any]:
    low, high = params.get("low", 0.8), params.get("high", 1.2)
    changes = {
        "tinker_ppo": {"low": 1.0 - low, "high": high - 1.0},
        "tinker_cispo": {"floor": low, "cap": high},
    }.get(made.name, {})
    return {"gate": made.gate.replace(**changes)}


def _chord(made: Recipe, params: Params) -> dict[str, Any]:
    mu, weight = params.get("mu", 0.1), "phi" if params.get("phi", True) else "plain"
    beside = (corrections.share(by=1.0 - mu),) if mu < 1 else made.correction
    gate = made.gate if mu < 1 else update_gates.silent()
    ratio = made.ratio if mu < 1 else ratios.on_policy()
    term = group_terms.weighted_nll(coef=mu, weight=weight)
    return {"correction": beside, "auxiliary": (term,), "gate": gate, "ratio": ratio}


def _sdpo(made: Recipe, params: Params) -> dict[str, Any]:
    cap = params.get("is_cap", 2.0)
    if cap == "none":
        return {"gate": gates.score(), "ratio": ratios.on_policy()}
    return {"gate": gates.weight_cap(cap=cap)}


def _gdpo(made: Recipe, params: Params) -> dict[str, Any]:
    eps, ddof = params.get("whiten_eps"), params.get("ddof", 1)
    rows = advantages.whiten_sequences(ddof=ddof, eps=1e-4 if eps is None else eps)
    known = {
        "rows": rows,
        "tokens": advantages.whiten_tokens(ddof=ddof, eps_in_var=1e-8 if eps is None else eps),
    }
    return {"advantage": (made.advantage[0], _pick(known, params, "whiten", "rows"))}


def _otb(made: Recipe, params: Params) -> dict[str, Any]:
    tail = "zero" if params.get("zero_tail", True) else "own"
    return {"advantage": (made.advantage[0].replace(tail=tail),)}


def _m2po(made: Recipe, params: Params) -> dict[str, Any]:
    # Of a case: the bounds are 1 − floor_low and 1 + floor_high.
    names = ("floor_low", "floor_high")
    return {"gate": made.gate.replace(**{key: params[key] for key in names if key in params})}


def _gigpo(made: Recipe, params: Params) -> dict[str, Any]:
    eps, ddof = params.get("eps", 1e-6), params.get("ddof", 1)
    known = {"group": advantages.group_zscore(ddof=ddof, eps=eps), "none": advantages.group_mean()}
    return {"advantage": (_pick(known, params, "scale", "group"), *made.advantage[1:])}


def _spo(made: Recipe, params: Params) -> dict[str, Any]:
    whiten = made.advantage[1]
    words = {key: params[key] for key in ("ddof", "eps") if key in params}
    return {"advantage": (made.advantage[0], whiten.replace(**words))}


_CHANGES: dict[str, Callable[[Recipe, Params], dict[str, Any]]] = {
    "vespo": _vespo,
    "dro": _drift,
    "kimi15": _drift,
    "topr": _topr,
    "rec": _rec,
    "outlier_mask": _outlier,
    "fipo": _fipo,
    "decoupled_ppo": _decoupled,
    "prime_rl": _prime_rl,
    "prime_rl_ipo": _prime_rl,
    "tinker_importance_sampling": _tinker,
    "tinker_ppo": _tinker,
    "tinker_cispo": _tinker,
    "chord": _chord,
    "sdpo": _sdpo,
    "gdpo": _gdpo,
    "otb": _otb,
    "m2po": _m2po,
    "spo": _spo,
    "gigpo": _gigpo,
}
