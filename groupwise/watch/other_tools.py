"""Logs of other tools as metrics lines under our names: TRL and verl, as far as they go.

Each tool is a table of names; no rule sees what is not in it.
"""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from groupwise.errors import RunError

Line = dict[str, Any]

TRL = {
    "reward": "reward/mean",
    "reward_std": "reward/std",
    "frac_reward_zero_std": "groups/dead_share",
    "entropy": "entropy/mean",
    "kl": "kl/ref",
    "grad_norm": "optim/grad_norm",
    "learning_rate": "optim/learning_rate",
    "completions/mean_length": "length/mean",
    "completion_length": "length/mean",  # before 0.16
    "completions/mean_terminated_length": "length/ended_mean",
    "completions/clipped_ratio": "length/truncated_share",
    "clip_ratio": "clip/fraction",  # before 0.18
    "clip_ratio/low_mean": "clip/low",
    "clip_ratio/high_mean": "clip/high",
    "sampling/sampling_logp_difference/mean": "mismatch/abs_mean",
    "sampling/sampling_logp_difference/max": "mismatch/abs_max",
    "sampling/importance_sampling_ratio/mean": "correction/mean",
    "eval_reward": "eval/reward",
    "step_time": "time/step",
}
VERL = {
    "critic/score/mean": "reward/mean",
    "critic/rewards/mean": "reward/shaped_mean",
    "actor/entropy": "entropy/mean",
    "actor/entropy_loss": "entropy/mean",  # before 0.4
    "actor/kl_loss": "kl/ref",
    "actor/reward_kl_penalty": "kl/ref",
    "critic/kl": "kl/ref",  # before 0.3
    "critic/vf_explained_var": "critic/explained_variance",
    "critic/vf_clipfrac": "critic/clip_share",
    "critic/vf_loss": "critic/loss",
    "critic/grad_norm": "critic/grad_norm",
    "critic/values/mean": "critic/value_mean",
    "critic/values/min": "critic/value_min",
    "critic/values/max": "critic/value_max",
    "critic/returns/mean": "critic/return_mean",
    "critic/score/min": "critic/reward_min",
    "critic/score/max": "critic/reward_max",
    "actor/grad_norm": "optim/grad_norm",
    "actor/lr": "optim/learning_rate",
    "actor/pg_clipfrac": "clip/fraction",
    "response_length/mean": "length/mean",
    "response_length/clip_ratio": "length/truncated_share",
    "training/rollout_probs_diff_mean": "mismatch/probability_mean",
    "training/rollout_probs_diff_max": "mismatch/probability_max",
    "timing_s/step": "time/step",
    "perf/throughput": "time/tokens_per_second",
}
# Where a value that is not finite has spoiled the weights, or will.
LOSSES = ("loss", "grad_norm", "actor/pg_loss", "actor/loss", "actor/grad_norm")
# What the settings that rules speak of are called there.
CALLED = {
    "trl": {
        "optim.learning_rate": "learning_rate",
        "engine.max_tokens": "max_completion_length",
        "overlong": "mask_truncated_completions",
        "group_size": "num_generations",
        "prompts_per_step": "per_device_train_batch_size",
        "recipe.gate.high": "epsilon_high",
        "recipe.schedule.updates": "num_iterations",
        "recipe.aggregation": "loss_type",
        "recipe.correction": "vllm_importance_sampling_mode",
        "reward.parts": "reward_funcs",
        "data.train": "train_dataset",
    },
    "verl": {
        "optim.learning_rate": "actor_rollout_ref.actor.optim.lr",
        "engine.max_tokens": "data.max_response_length",
        "group_size": "actor_rollout_ref.rollout.n",
        "prompts_per_step": "data.train_batch_size",
        "recipe.gate.high": "actor_rollout_ref.actor.clip_ratio_high",
        "recipe.schedule.updates": "actor_rollout_ref.actor.ppo_epochs",
        "recipe.aggregation": "actor_rollout_ref.actor.loss_agg_mode",
        "recipe.correction": "algorithm.rollout_correction.rollout_is",
        "reward.parts": "custom_reward_function",
        "data.train": "data.train_files",
    },
}
# Held-out accuracy of one of several sets: their mean is ours.
VERL_EVAL = re.compile(r"val-core/.+/(?:acc|reward)/mean@\d+|val/test_score/.+")
CONSOLE = re.compile(r"\bstep:(\d+) - (.+)")
NUMBER = re.compile(r"(?:np\.\w+\()?(-?(?:\d+\.?\d*(?:[eE][+-]?\d+)?|inf|nan))\)?")
OURS = ("reward/mean", "reward/sampled_mean", "entropy/mean", "eval/accuracy", "optim/grad_norm")


def read_log(path: Path) -> tuple[str, list[Line]]:
    """Return the tool that wrote a log, and its lines under our names, one a step."""
    file = find_log(path)
    raw = list(_entries(file))
    merged: dict[int, Line] = {}  # training and evaluation of a step may be lines of their own
    for entry in raw:
        merged.setdefault(int(entry["step"]), {"step": int(entry["step"])}).update(entry)
    lines = [merged[step] for step in sorted(merged)]
    names = {name for line in lines for name in line}
    for tool, table in (("groupwise", dict.fromkeys(OURS)), ("verl", VERL), ("trl", TRL)):
        if names & set(table):
            return tool, lines if tool == "groupwise" else [_renamed(line, tool) for line in lines]
    raise RunError(
        f"{file} has no metric that is known here, of groupwise, TRL or verl. It should be a run "
        "folder, TRL's trainer_state.json or what it printed, or lines of verl's console or file "
        "logger."
    )


def find_log(path: Path) -> Path:
    """Return a file, or the one in a folder that tells most: of TRL, the last checkpoint's."""
    if path.is_file():
        return path
    if not path.is_dir():
        raise RunError(f"There is no run {str(path)!r}: no folder and no file of that name.")
    states = [*path.glob("trainer_state.json"), *path.glob("checkpoint-*/trainer_state.json")]
    if states:
        return max(states, key=lambda state: (_number(state.parent.name), state.stat().st_mtime))
    logs = [*path.glob("*.jsonl"), *path.glob("*.log"), *path.glob("*.txt")]
    logs = [log for log in logs if log.is_file()]
    if len(logs) == 1:
        return logs[0]
    found = f"{len(logs)} files that might be" if logs else "no"
    raise RunError(
        f"{path} is no run folder (no metrics.jsonl), and has {found} logs of TRL or verl "
        "(trainer_state.json, *.jsonl, *.log). Name the file itself."
    )


def _number(name: str) -> int:
    digits = name.rpartition("-")[2]
    return int(digits) if digits.isdecimal() else -1


def names_in_tool(change: str, tool: str) -> str:
    """Return another tool's names of the settings in a rule's advice; "" for ours."""
    named = [f"{ours} is {theirs}" for ours, theirs in CALLED.get(tool, {}).items()
             if re.search(rf"(?<![\w.]){re.escape(ours)}(?![\w.]*\w)", change)]  # fmt: skip
    return f"In {tool}, {', '.join(named)}." if named else ""


def _entries(file: Path) -> Iterable[Line]:
    """Yield objects with a step, whatever else a log holds; a torn last line is left out."""
    try:
        text = file.read_text("utf-8", errors="replace")
    except OSError as error:
        raise RunError(f"{file} can't be read: {error}.") from error
    history = _history(text)
    if history is None and file.name == "trainer_state.json":
        raise RunError(f"{file} is not JSON with a log_history.")
    lines = (_object(line) or _console(line) for line in text.splitlines())
    found = _numbered(lines if history is None else history)
    yield from (entry for entry in found if _is_step(entry))


def _history(text: str) -> list[Any] | None:
    """Read TRL's trainer_state.json, under whatever name, or its log_history alone."""
    try:
        state = json.loads(text)
    except ValueError:
        return None
    found = state.get("log_history") if isinstance(state, dict) else state
    return found if isinstance(found, list) else None


def _numbered(entries: Iterable[Any]) -> Iterator[Line]:
    """Number TRL's printed lines, which name no step: training lines count, others follow."""
    count = 0
    for entry in entries:
        if not isinstance(entry, dict) or "step" in entry or not entry.keys() & TRL.keys():
            yield entry
            continue
        count += "grad_norm" in entry or "learning_rate" in entry
        yield {**entry, "step": count}


def _is_step(entry: object) -> bool:
    step = entry.get("step") if isinstance(entry, dict) else None
    return isinstance(step, int | float) and math.isfinite(step) and step >= 0


def _object(line: str) -> Line:
    """Read a JSON line, where verl has the metrics under `data`; or a dict, printed by TRL."""
    start = line.find("{")
    if start < 0:
        return {}
    text, entry = line[start:].strip(), None
    try:
        entry = ast.literal_eval(text) if text.startswith("{'") else json.loads(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return {}
    if not isinstance(entry, dict):
        return {}
    inner = entry.get("data")
    entry = {"step": entry.get("step"), **inner} if isinstance(inner, dict) else entry
    return {str(name): _as_number(value) for name, value in entry.items()}


def _as_number(value: object) -> object:
    """Read a number from text, as TRL prints them."""
    if isinstance(value, str) and (found := NUMBER.fullmatch(value)):
        return float(found[1])
    return value


def _console(line: str) -> Line:
    """Read `step:12 - actor/entropy:0.31 - critic/score/mean:0.5`, behind any prefix."""
    found = CONSOLE.search(line)
    if found is None:
        return {}
    entry: Line = {"step": int(found[1])}
    for pair in found[2].split(" - "):
        name, _, value = pair.rpartition(":")
        number = NUMBER.match(value.strip())
        if name and number:
            entry[name.strip()] = float(number[1])
    return entry


def _renamed(line: Mapping[str, Any], tool: str) -> Line:
    table = VERL if tool == "verl" else TRL
    made: Line = {"step": line["step"]}
    for theirs, ours in table.items():
        if isinstance(line.get(theirs), int | float) and ours not in made:
            made[ours] = line[theirs]
    losses = [line[name] for name in LOSSES if isinstance(line.get(name), int | float)]
    if losses:
        made["optim/not_finite"] = float(not all(map(math.isfinite, losses)))
    if tool == "verl":
        scores = [value for name, value in line.items() if VERL_EVAL.fullmatch(name)
                  and isinstance(value, int | float) and math.isfinite(value)]  # fmt: skip
        if scores:
            made["eval/accuracy"] = sum(scores) / len(scores)
    return made
