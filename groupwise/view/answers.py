"""Pages of answers: a step, its groups, a sample, a prompt through training, and a search."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]
from markupsafe import Markup
from tokenizers import Tokenizer

from groupwise.errors import RunError
from groupwise.runfiles.partial import PartialReader
from groupwise.runfiles.rollouts import VERSION, read_answers
from groupwise.view import chat
from groupwise.view.prompts import PromptIndex
from groupwise.view.render import EXCERPT, TEXT_SHOWN, count, render, shown
from groupwise.view.runs import USEFUL, ViewedRun
from groupwise.view.search import TextSearch
from groupwise.view.steps import (
    FILTERS,
    OF_GROUPS,
    OF_SAMPLES,
    PromptGroup,
    branch_rewards,
    finite,
    found_in,
    group_numbers,
    groups_of,
    histogram,
    mark,
    own_lengths,
    place_of,
    rows_of_group,
    values_of,
)
from groupwise.view.tokens import pieces, tokenizer_of
from groupwise.watch.chart import Curve, Point, svg
from groupwise.watch.report import curves_of

GROUPS_SHOWN = 50  # on one page
SORTS = {"number": "group", "mean": "reward", "spread": "spread", "length": "length"}
CRITIC = ("value", "return")  # columns of a sample's own page
BESIDE = 6  # draws of a prompt that stand side by side


def step_page(run: ViewedRun, step: int, asked: Mapping[str, str]) -> str:
    path = run.folder.rollout(step)
    table, version = read_answers(path, OF_GROUPS)
    everything = groups_of(table)
    words, kind = asked.get("search", ""), asked.get("only", "")
    kind = kind if kind in FILTERS else ""
    sort, up = asked.get("sort", "spread"), asked.get("up", "")
    sort = sort if sort in SORTS else "spread"
    groups = [group for group in everything if not kind or group.fits(kind)]
    if words:
        hits = found_in(path, words)
        groups = [group for group in groups if group.number in hits]
    groups.sort(key=lambda group: _sort_key(group, sort, up == "1"))
    pages = max(1, -(-len(groups) // GROUPS_SHOWN))
    page = min(max(count(asked.get("page", "1"), 1), 1), pages)
    counts = {name: sum(group.fits(name) for group in everything) for name in FILTERS}
    listed = groups[(page - 1) * GROUPS_SHOWN : page * GROUPS_SHOWN]
    run.refresh()
    return render(
        "step.html",
        run=run,
        step=step,
        groups=listed,
        prompts=chat.own_words([group.prompt for group in listed]),
        found=len(groups),
        total=len(everything),
        samples=table.num_rows,
        filters=FILTERS,
        counts=counts,
        sorts=SORTS,
        asked={"search": words, "only": kind, "sort": sort, "up": "1" if up == "1" else ""},
        page=page,
        pages=pages,
        older=_older(version),
        tiles=_step_tiles(run, step),
        metrics=run.at(step),
        histogram=histogram([x for group in everything for x in group.known]),
        **_neighbours(run, step),
    )


def _step_tiles(run: ViewedRun, step: int) -> list[tuple[str, str]]:
    """Return the metrics of a step that a run is judged by."""
    values = run.at(step)
    names = [(title, USEFUL if name == "groups/dead_share" else name, share)
             for title, name, share in curves_of(run.columns)]  # fmt: skip
    return [(title, shown(values[name], share)) for title, name, share in names if name in values]


def _sort_key(group: PromptGroup, sort: str, up: bool) -> tuple[bool, float, int]:
    value = {"spread": group.spread, "mean": group.mean, "length": group.length,
             "number": -group.number}[sort]  # fmt: skip
    if value is None:
        return True, 0.0, group.number
    return False, value if up else -value, group.number


def group_page(run: ViewedRun, step: int, group: int, sort: str = "") -> str:
    path = run.folder.rollout(step)
    rows, version = rows_of_group(path, group, OF_SAMPLES)
    samples = _samples(rows)
    if sort != "number":  # the best and the worst stand apart; the greedy one is no part of it
        samples.sort(key=lambda x: (x["sample"] >= 0, -(x["advantage"] or (float("-inf"),))[0]))
    numbers = group_numbers(path)
    parts = {name: _ends(samples, name) for each in samples for name in each["parts"]}
    return render("group.html", run=run, step=step, group=group, samples=samples, sort=sort,
                  before=max((n for n in numbers if n < group), default=None),
                  after=min((n for n in numbers if n > group), default=None), parts=parts,
                  turns=chat.turns(samples[0]["prompt_text"]), older=_older(version),
                  excerpt=EXCERPT)  # fmt: skip


def _ends(samples: Sequence[Mapping[str, Any]], part: str) -> tuple[float, float]:
    """Return the lowest and the highest value of a part of the reward, 0 to 1 at the least."""
    values = [x for each in samples if (x := finite(each["parts"].get(part))) is not None]
    return min([0.0, *values]), max([1.0, *values])


def sample_page(run: ViewedRun, step: int, group: int, sample: int) -> str:
    rows, version = rows_of_group(run.folder.rollout(step), group, (*OF_SAMPLES, *CRITIC))
    samples = _samples(rows)
    ids = values_of(rows, "token_ids", place_of(rows, sample))
    numbers, at = [each["sample"] for each in samples], place_of(rows, sample)
    thought, answer = chat.thought_and_answer(samples[at]["text"])
    return render(
        "sample.html",
        run=run,
        step=step,
        group=group,
        sample=samples[at],
        turns=chat.turns(samples[at]["prompt_text"]),
        thought=thought,
        reply=answer,
        written=written_by(samples[at]["turns"] or (), ids, tokenizer_of(run.folder)),
        critic=_critic(rows, at),
        judged=judged_pieces(samples[at]["text"], samples[at]["reward_steps"] or ()),
        valued=valued_pieces(
            branch_rewards(run.folder.rollout(step), group, sample), ids, tokenizer_of(run.folder)
        ),
        limit=TEXT_SHOWN,
        before=numbers[at - 1] if at else None,
        after=numbers[at + 1] if at + 1 < len(numbers) else None,
        older=_older(version),
    )


def _critic(rows: pa.Table, at: int) -> list[tuple[str, Markup]]:
    """Return pictures of a critic's values along the answer and of the returns they aim at."""
    found = []
    for name, title in (("value", "Value before each token"), ("return", "Return that it aims at")):
        values = values_of(rows, name, at)
        if values is not None and len(values):
            points = [Point(place, float(x)) for place, x in enumerate(values, start=1)]
            found.append((title, Markup(svg(Curve(title, points)))))  # of ours: numbers alone
    return found


def written_by(
    turns: Sequence[Mapping[str, Any]], ids: Any, tokenizer: Tokenizer | None
) -> list[chat.Said]:
    """Return the turns of a completion in which others wrote; none if the policy wrote all."""
    if len(turns) < 2 or ids is None:
        return []
    texts = pieces(ids.tolist(), tokenizer)
    return [chat.Said(turn["role"], "".join(texts[turn["start"] : turn["end"]])) for turn in turns]


def judged_pieces(text: str, steps: Sequence[Mapping[str, Any]]) -> list[tuple[str, float]]:
    """Return the pieces of a completion that have a process reward each, and that reward."""
    starts = [0, *(step["end"] for step in steps)]
    return [(text[start : step["end"]], step["reward"])
            for start, step in zip(starts, steps, strict=False)]  # fmt: skip


def valued_pieces(
    rewards: Mapping[int, Sequence[float | None]], ids: Any, tokenizer: Tokenizer | None
) -> list[tuple[str, float | None, int]]:
    """Return the pieces of a completion between positions that branches go on from, the mean reward
    of those behind each, and their number; nothing where there are none.
    """
    if not rewards or ids is None:
        return []
    texts, places = pieces(ids.tolist(), tokenizer), list(rewards)
    made = []
    for start, end in pairwise([0, *places]):
        known = [x for x in rewards[end] if x is not None]
        mean = sum(known) / len(known) if known else None
        made.append(("".join(texts[start:end]), mean, len(rewards[end])))
    return [*made, ("".join(texts[places[-1] :]), None, 0)]


def sample_text(run: ViewedRun, step: int, group: int, sample: int) -> str:
    """Return prompt and completion as they are, for a text viewer."""
    columns = ("group", "sample", "prompt_text", "text")
    rows, _ = rows_of_group(run.folder.rollout(step), group, columns)
    row = rows.slice(place_of(rows, sample), 1).to_pylist()[0]
    return f"{row['prompt_text'] or ''}{row['text'] or ''}"


def _samples(rows: pa.Table) -> list[dict[str, Any]]:
    """Return rows with derived values. Lists per token stay arrays: they may be very long."""
    lists = ("token_ids", "mask", "advantage", "clipped", "rerouted")
    made, own = [], own_lengths(rows)
    dropped = [name for name in (*lists, *CRITIC) if name in rows.column_names]
    for at, row in enumerate(rows.drop_columns(dropped).to_pylist()):
        ids, mask, advantage, clipped, rerouted = (values_of(rows, name, at) for name in lists)
        learned = None if advantage is None else advantage[advantage != 0]
        made.append(
            {
                **row,
                "prompt_text": row["prompt_text"] or "",
                "text": row["text"] or "",
                "mark": mark(row["correct"], row["reward"]),
                "length": own[at],
                "foreign": 0 if ids is None else len(ids) - own[at],  # tokens of others
                "parts": dict(row["reward_parts"] or ()),
                # Of tokens that are learned from; a range where they differ.
                "advantage": None
                if learned is None or not len(learned)
                else (float(learned.min()), float(learned.max())),
                "clipped": None if clipped is None else int(clipped.sum()),
                # Of its own tokens and their layers: visited by other experts than at sampling.
                "rerouted": None
                if rerouted is None or mask is None or not mask.any()
                else float(rerouted[mask].mean()),
            }
        )
    return made


def prompt_page(run: ViewedRun, prompt_id: int, index: PromptIndex) -> str:
    seen = PartialReader()
    draws = index.draws(prompt_id, seen)
    if not draws:
        unread = f" {seen.damage[0]}" if seen.damage else ""
        raise RunError(f"No step of {run.name} has drawn prompt {prompt_id}.{unread}")
    last = len(draws) - 1  # from the first draw to the latest, evenly
    places = dict.fromkeys(round(last - k * last / (BESIDE - 1)) for k in range(BESIDE))
    return render("prompt.html", run=run, prompt_id=prompt_id, draws=draws, damage=seen.damage,
                   beside=[draws[place] for place in places],
                   turns=chat.turns(draws[0][1].prompt), excerpt=EXCERPT // 3)  # fmt: skip


def search_page(run: ViewedRun, asked: Mapping[str, str], search: TextSearch) -> str:
    """Return samples of any step that have some words, the latest first."""
    words = asked.get("q", "").strip()
    before = count(asked.get("before", ""), 0) or None
    seen = PartialReader()
    found = search.look(words, before, seen) if words else None
    return render("search.html", run=run, words=words, found=found, damage=seen.damage,
                  excerpt=EXCERPT // 3)  # fmt: skip


# --- helpers ----------------------------------------------------------------------------------


def _neighbours(run: ViewedRun, step: int) -> dict[str, int | None]:
    steps = run.folder.rollout_steps()
    return {
        "before": max((s for s in steps if s < step), default=None),
        "after": min((s for s in steps if s > step), default=None),
    }


def _older(version: int) -> str:
    if version == VERSION:
        return ""
    return (
        f"Written by an older groupwise (rollout schema {version or 'unknown'}, this one has "
        f"{VERSION}): what it did not record is left out."
    )
