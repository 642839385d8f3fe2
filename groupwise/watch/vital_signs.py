"""The numbers of a step that tell whether a run is well, as a line or a panel shows them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from groupwise.runfiles.catalogue import REWARD

PHASES = ("rollout", "grade", "score", "update", "eval", "checkpoint")
TRUNCATED_SHARE = 0.1  # above it the line says so
TRAINED = "training reward"  # of a step's own samples, as against that of held-out tasks

Metrics = Mapping[str, Any]


def vital_signs(metrics: Metrics) -> list[tuple[str, str]]:
    """Return the numbers that tell whether a run is well; "" where the step has none."""

    def shown(name: str, form: str) -> str:
        value = metrics.get(name)
        return "" if value is None else format(value, form)

    reward, useful = training_reward(metrics), useful_share(metrics)
    speed = shown("time/tokens_per_second", ",.0f")
    failed = metrics.get("reward/failed_share")
    skipped = metrics.get("optim/skipped")
    return [
        (TRAINED, "" if reward is None else f"{reward:.3f}"),
        ("useful groups", "" if useful is None else percent(useful)),
        ("refills", refills(metrics)),
        ("length", length(metrics)),
        ("entropy", shown("entropy/mean", ".2f")),
        ("mismatch", shown("mismatch/abs_mean", ".1e")),
        ("nll", shown("supervised/nll", ".3f")),
        ("held-out nll", shown("eval/nll", ".3f")),
        *compared(metrics),
        ("explained variance", shown("critic/explained_variance", ".2f")),
        ("policy", "waits, critic alone" if waits(metrics) else ""),
        ("grad", shown("optim/grad_norm", ".3g")),
        ("clip", clip(metrics)),
        ("graders failed", percent(failed) if failed else ""),
        ("updates skipped", f"{skipped:.0f}" if skipped else ""),
        ("", f"{speed} tok/s" if speed else ""),
    ]


def compared(metrics: Metrics) -> list[tuple[str, str]]:
    """Return how well a step's answers are told apart: of preferences, and of models that score."""
    accuracy = _first(metrics, "scores/accuracy", "steps/accuracy", "pairs/accuracy")
    margin = _first(metrics, "scores/margin", "pairs/margin")
    good, bad = metrics.get("answers/good_reward"), metrics.get("answers/bad_reward")
    if good is not None and bad is not None:
        margin = good - bad
    loss = metrics.get("loss/preference")
    return [
        ("loss", "" if loss is None else f"{loss:.3f}"),
        ("accuracy", "" if accuracy is None else percent(accuracy)),
        ("margin", "" if margin is None else f"{margin:.3f}"),
    ]


def _first(metrics: Metrics, *names: str) -> float | None:
    return next((metrics[name] for name in names if metrics.get(name) is not None), None)


def training_reward(metrics: Metrics) -> float | None:
    """Return the mean reward of a step's samples, dropped groups included where that is known.

    Rows that are learned as they stand have a weight in its place, which says nothing of a policy.
    """
    return None if supervised(metrics) else _first(metrics, *REWARD)


def supervised(metrics: Metrics) -> bool:
    """Return whether the step learned rows of the data as they stand."""
    return "supervised/nll" in metrics


def waits(metrics: Metrics) -> bool:
    """Return whether the policy waited in this step, while a critic learned alone."""
    return metrics.get("updates/count") == 0


def useful_share(metrics: Metrics) -> float | None:
    """Return the share of useful groups among all sampled; those that were dropped were useless."""
    dead = metrics.get("groups/dead_share")
    if dead is None:
        return None
    count, drawn = metrics.get("groups/count"), metrics.get("refill/drawn_groups")
    kept = count / drawn if count and drawn else 1.0
    return float((1 - dead) * kept)


def refills(metrics: Metrics) -> str:
    """Return what dynamic sampling cost: rounds, their tokens, and what was sampled and dropped."""
    rounds, dropped = metrics.get("refill/rounds"), metrics.get("cost/wasted/dropped")
    if not rounds and not dropped:
        return ""
    spent = f"{rounds or 0:.0f} ({metrics.get('refill/tokens') or 0:,.0f} tokens)"
    return spent + (f", {percent(dropped)} of tokens dropped" if dropped is not None else "")


def length(metrics: Metrics) -> str:
    mean, cut = metrics.get("length/mean"), metrics.get("length/truncated_share")
    if mean is None:
        return ""
    return f"{mean:,.1f}" + (f" ({percent(cut)} cut off)" if cut and cut > TRUNCATED_SHARE else "")


def clip(metrics: Metrics) -> str:
    """Return the share of clipped tokens; none can be in one on-policy update."""
    sides = [metrics.get(f"clip/{side}") for side in ("low", "high")]
    known = [side for side in sides if side is not None]
    if metrics.get("updates/count") == 1 and known and not sum(known):
        return "" if supervised(metrics) else "n/a (on-policy)"
    return percent(sum(known), 1) if known else ""


def phases(metrics: Metrics) -> list[tuple[str, float]]:
    """Return the seconds of each phase that takes a twentieth of the step or more, in order."""
    spent = {name: metrics.get(f"time/{name}") or 0.0 for name in PHASES}
    least = 0.05 * (metrics.get("time/step") or sum(spent.values()))
    return [(name, seconds) for name, seconds in spent.items() if seconds and seconds >= least]


def bottleneck(metrics: Metrics) -> str:
    """Return the phase alone."""
    return str(metrics.get("time/bottleneck", "")).partition(",")[0]


def of_peak(phase: str, metrics: Metrics) -> str:
    """Return how much of the device's peak a phase used, where that is known."""
    known = {
        "rollout": ("time/rollout_bandwidth_share", "bandwidth"),
        "update": ("time/update_flops_share", "FLOPs"),
    }
    name, of = known.get(phase, ("", ""))
    share = metrics.get(name)
    return "" if share is None else f" ({percent(share)} {of})"


def percent(share: float, digits: int = 0) -> str:
    return f"{100 * share:.{digits}f} %"
