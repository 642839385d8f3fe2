"""Measures of a step's episodes: turns, calls, why they ended, what others said."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from groupwise.records import Episode, Rollout

Groups = Sequence[Sequence[Rollout]]
MANY = 8  # turns: episodes with more are counted together


def turn_measures(groups: Groups) -> dict[str, float]:
    """Measure the episodes of a step; nothing where no environment answered."""
    rows = [row for group in groups for row in group]
    episodes = [row.completion.episode for row in rows]
    known = [episode for episode in episodes if episode is not None]
    if not known:
        return {}
    number = len(known)
    foreign = sum(len(r.completion.token_ids) - r.completion.own_length for r in rows)
    stops = Counter(episode.stop for episode in known)
    seconds = sum(turn.seconds for episode in known for turn in episode.turns)
    return {
        "turns/mean": sum(len(episode.turns) for episode in known) / number,
        "turns/limit_share": stops["max_turns"] / number,
        "turns/failed_share": sum(episode.failed for episode in known) / number,
        "turns/foreign_tokens": foreign / number,
        **_calls(known),
        **{f"turns/stop/{stop}": count / number for stop, count in sorted(stops.items())},
        **_rewards(rows),
        "time/environment": seconds / number,
    }


def ends_in_words(shares: Mapping[str, float]) -> list[str]:
    """Return the ways in which episodes ended, the most frequent first."""
    by_share = sorted(shares.items(), key=lambda pair: (-pair[1], pair[0]))
    return [f"{name} {_percent(share)}" for name, share in by_share if share > 0]


def _percent(share: float) -> str:
    return f"{share:.1%}" if 0 < share < 0.1 else f"{share:.0%}"


def _calls(episodes: Sequence[Episode]) -> dict[str, float]:
    """Measure calls of tools, where there are any or could be."""
    made = [[call for turn in episode.turns for call in turn.calls] for episode in episodes]
    calls = [call for own in made for call in own]
    found = {"turns/calls": len(calls) / len(episodes)}
    if not calls:
        return found
    repeated = sum(len(own) - len({(c.name, c.arguments) for c in own}) for own in made)
    return {
        **found,
        "turns/failed_call_share": sum(call.status != "ok" for call in calls) / len(calls),
        "turns/call_timeout_share": sum(call.status == "timeout" for call in calls) / len(calls),
        "turns/repeated_call_share": repeated / len(calls),
    }


def _rewards(rows: Sequence[Rollout]) -> dict[str, float]:
    """Return the mean reward of episodes by how many turns they had."""
    by_turns: dict[str, list[float]] = {}
    for row in rows:
        episode, reward = row.completion.episode, row.grade.reward
        if episode is not None and reward is not None:
            turns = len(episode.turns)
            name = str(turns) if turns <= MANY else f"over_{MANY}"
            by_turns.setdefault(name, []).append(reward)
    return {f"turns/reward/{name}": sum(own) / len(own) for name, own in sorted(by_turns.items())}
