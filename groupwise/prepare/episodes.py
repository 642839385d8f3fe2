"""Episodes for those who sample: prompts of the data in, groups of whole conversations out."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from groupwise.common.progress import phase
from groupwise.config import Config
from groupwise.data.prompts import Wording
from groupwise.engine.protocol import Done, Engine, Sampling
from groupwise.envs.environment import Observation
from groupwise.envs.episodes import EpisodeLimits
from groupwise.envs.playing import Played, Players, StartingPrompt
from groupwise.envs.recorded_worlds import RecordedWorlds
from groupwise.envs.turn_template import TurnTemplate
from groupwise.envs.worlds import Worlds
from groupwise.model.formats.tokenizer import Tokenizer
from groupwise.prepare.rollouts import SampledGroup
from groupwise.records import Episode, Task

# By prompt, draw and sample (-1: the likeliest answer): the prompt's tokens, and what was said.
Conversations = Mapping[tuple[int, int, int], tuple[tuple[int, ...], Episode]]


class Turns:
    """Who answers the policy between its turns. Environments are opened when they are needed."""

    def __init__(
        self,
        config: Config,
        tokenizer: Tokenizer,
        context: int,
        template: TurnTemplate,
        open_worlds: Callable[[], Worlds],
    ) -> None:
        self.config, self.tokenizer, self.template = config, tokenizer, template
        self.context = min(config.turns.context or context, context)
        self._open_worlds = open_worlds
        self.recorded: Conversations = {}  # answers of training that are not asked for again
        data = config.data
        self.wording = Wording(data.template, data.system, data.instruction)

    @cached_property
    def worlds(self) -> Worlds:
        """Return the environments, which go on until `close`."""
        return self._open_worlds()

    def close(self) -> None:
        """Give back the environments, if there are any yet."""
        if "worlds" in vars(self):
            self.worlds.close()
            del self.worlds

    def sample(
        self,
        engine: Engine,
        prompts: Sequence[tuple[Task, int]],
        samples: int,
        sampling: Sampling,
        stream: str,
        done: Done | None = None,
    ) -> list[SampledGroup]:
        """Play episodes for (task, draw number) pairs, as `sample_groups` samples answers.

        The tasks of the groups have the prompt that the policy has read: tools and the first words
        of the environment are part of it.
        """
        known = self._known(prompts, samples, sampling, stream)
        starts = [
            StartingPrompt(row_of(task), task.id, draw, self._opening(task, known))
            for task, draw in prompts
        ]
        heard = [episode for _, episode in known.values()]
        players = Players(
            engine,
            RecordedWorlds(heard) if known else self.worlds,
            self.template,
            self.tokenizer,
            self.limits(sampling),
            sampling,
            stream,
        )

        def told_of(number: int, group: Played) -> None:
            if done is not None:
                done(number, group.completions)

        with phase("playing", things="turns") as told:
            played = players.play_all(starts, samples, told_of, told)
        return [
            SampledGroup(_read(task, group.prompt), draw, group.completions)
            for (task, draw), group in zip(prompts, played, strict=True)
        ]

    def limits(self, sampling: Sampling) -> EpisodeLimits:
        """Return when an episode ends that nobody has ended."""
        turns = self.config.turns
        return EpisodeLimits(
            tokens=sampling.max_tokens,
            context=self.context,
            turns=turns.max,
            calls=turns.max_calls,
            turn_tokens=turns.turn_tokens,
            observation=turns.observation,
            seconds=turns.episode_timeout,
            truncated=frozenset(turns.truncated),
            left_out=frozenset(turns.left_out),
        )

    def _known(
        self, prompts: Sequence[tuple[Task, int]], samples: int, sampling: Sampling, stream: str
    ) -> Conversations:
        """Return the recorded episodes of all these samples, in order; none if one is missing."""
        first = 0 if sampling.temperature else -1
        places = [(task.id, draw, first + n) for task, draw in prompts for n in range(samples)]
        if stream != "train" or not all(place in self.recorded for place in places):
            return {}
        return {place: self.recorded[place] for place in places}

    def _opening(
        self, task: Task, known: Conversations
    ) -> Callable[[Observation], tuple[int, ...]]:
        prompts = {prompt: ids for (prompt, _, _), (ids, _) in known.items()}

        def opening(first: Observation) -> tuple[int, ...]:
            if task.id in prompts:
                return prompts[task.id]
            if first.tools is not None:
                return tuple(self.template.opening(first.messages, first.tools))
            tools = self.worlds.tools
            if not first.messages and not tools:
                return task.token_ids  # the prompt as it is without turns
            asked = self.wording(task)
            messages = [{"role": "user", "content": asked}] if isinstance(asked, str) else asked
            return tuple(self.template.opening((*messages, *first.messages), tools))

        return opening


@contextlib.contextmanager
def ended(turns: Turns | None) -> Iterator[None]:
    """Give back environments at the end of a block, if there are any."""
    try:
        yield
    finally:
        if turns is not None:
            turns.close()


def row_of(task: Task) -> dict[str, Any]:
    """Return a row of the data as environments read it."""
    return {**task.columns, "prompt": task.prompt, "answer": task.answer}


def _read(task: Task, prompt: tuple[int, ...]) -> Task:
    return task if prompt == task.token_ids else replace(task, token_ids=prompt)
