"""Episodes: what becomes one row, when they end, and that nobody's speed changes anything."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_zoo import engine, learner_logp, request, same, tokenizer
from inline_worlds import InlineWorlds
from played import Adder, Quiet, Shuffled, Words, says

from groupwise.engine.batch import BatchEngine
from groupwise.engine.protocol import Request, Sampling, turn_stream
from groupwise.envs.environment import Call, Environment, Observation
from groupwise.envs.episodes import EpisodeLimits
from groupwise.envs.playing import Played, Players, StartingPrompt
from groupwise.envs.worlds import Worlds
from groupwise.errors import WorldError
from groupwise.prepare.recorded import groups_of
from groupwise.records import Completion, Grade, Rollout, Task
from groupwise.runfiles import rollouts
from groupwise.runfiles.rollouts import Row

END = 0
TOKENS = tokenizer((END,))
PROMPT = (5, 6, 7)
WIDE = EpisodeLimits(tokens=60, context=200)
LIMITS = ("max_turns", "max_calls", "own_tokens", "context")


def play(
    own: Any,
    worlds: Worlds | Callable[[], Environment],
    limits: EpisodeLimits = WIDE,
    samples: int = 2,
    prompts: Sequence[tuple[int, ...]] = (PROMPT,),
    **changes: Any,
) -> list[Played]:
    worlds = worlds if isinstance(worlds, Worlds) else InlineWorlds(worlds)
    sampling = Sampling(max_tokens=limits.tokens, **changes)
    template = Words(TOKENS)
    players = Players(own, worlds, template, TOKENS, limits, sampling, "train")

    def opening(prompt: tuple[int, ...]) -> Callable[[Any], tuple[int, ...]]:
        def opened(first: Observation) -> tuple[int, ...]:
            return (*prompt, *(template.bridge(first.messages) if first.messages else ()))

        return opened

    starts = [StartingPrompt({"n": n}, n, 3, opening(prompt)) for n, prompt in enumerate(prompts)]
    found = players.play_all(starts, samples)
    if isinstance(worlds, InlineWorlds):
        assert not worlds.there and not worlds.ready  # all are given back
    return found


class Scripted(BatchEngine):
    """Says what it is told to, turn by turn, for each sample; keeps what it was asked."""

    def __init__(self, *turns: str, ended: str = "eos") -> None:
        self.turns, self.ended, self.asked = turns, ended, list[Request]()

    def answer(self, requests: Sequence[Request], sampling: Sampling) -> list[list[Completion]]:
        self.asked += requests
        return [[self.one(each) for _ in range(each.samples)] for each in requests]

    def one(self, asked: Request) -> Completion:
        turn = int(asked.stream.split()[-1]) if asked.stream.startswith("turn") else 0
        ids = TOKENS.encode(self.turns[turn])
        ids, finish = ([*ids, END], "eos") if self.ended == "eos" else (ids, "stop")
        if asked.limit and len(ids) > asked.limit:
            ids, finish = ids[: asked.limit], "length"
        logp_T = torch.arange(len(ids)).float() - 100.0 * (turn + 1)
        return Completion(tuple(ids), logp_T, finish, turn)  # type: ignore[arg-type]


def only(played: list[Played]) -> Completion:
    (group,) = played
    return group.completions[0]


class Talker(Environment):
    """Answers as it is told to: a list of what comes of each turn."""

    said: tuple[Any, ...] = ()
    whole: float | None = None
    first: Observation = Observation()

    def reset(self, row: Mapping[str, Any]) -> Observation:
        self.left, self.heard = list(self.said), list[str]()
        return self.first

    def step(self, text: str) -> Observation:
        self.heard.append(text)
        found = self.left.pop(0)
        if isinstance(found, Exception):
            raise found
        return found

    def outcome(self) -> float | None:
        return self.whole


def talker(*said: Any, **changes: Any) -> type[Talker]:
    return type("Told", (Talker,), {"said": said, **changes})


# --- one row --------------------------------------------------------------------------------------


def test_a_row_is_prompt_turn_bridge_turn() -> None:
    """By hand: what is said, whose it is, and every number where it belongs."""
    call = Call("add", {"b": 1, "a": "é"}, "ok")
    world = talker(says("no", reward=-0.5, calls=(call,)), Observation(reward=2.0), whole=0.25)
    row = only(play(Scripted("3?", "ok!"), world, samples=1))
    ids = [*TOKENS.encode("3?"), END, *TOKENS.encode("[no]"), *TOKENS.encode("ok!"), END]
    assert list(row.token_ids) == ids
    assert [(turn.role, turn.start, turn.end) for turn in row.turns] == [
        ("assistant", 0, 3), ("tool", 3, 7), ("assistant", 7, 11)
    ]  # fmt: skip
    assert row.mask_T is not None and row.mask_T.int().tolist() == [1] * 3 + [0] * 4 + [1] * 4
    logps = [-100.0, -99.0, -98.0, 0.0, 0.0, 0.0, 0.0, -200.0, -199.0, -198.0, -197.0]
    assert row.logp_T.tolist() == logps
    assert row.own_length == 7 and row.finish == "eos" and row.version == 0
    episode = row.episode
    assert episode is not None and (episode.stop, episode.reward) == ("answered", 1.75)
    first, second = episode.turns
    assert (first.reward, first.finish, first.version) == (-0.5, "eos", 0)
    assert (second.reward, second.calls, second.version) == (2.0, (), 1)
    assert first.calls == (("add", '{"a": "é", "b": 1}', "ok"),)
    assert [m["content"] for m in episode.messages] == ["3?", "no", "ok!"]


def test_words_are_handed_over_without_what_ended_them() -> None:
    heard: list[str] = []

    class Ears(Quiet):
        def step(self, text: str) -> Observation:
            heard.append(text)
            return Observation()

    play(Scripted("3+4"), Ears, samples=1)
    play(Scripted("3+4;tail", ended="stop"), Ears, samples=1, stop=(";",))
    assert heard == ["3+4", "3+4"]


def test_the_first_words_are_part_of_the_prompt() -> None:
    own = Scripted("7", "8")
    (group,) = play(own, talker(Observation(), first=says("go")), samples=3)
    assert group.prompt == (*PROMPT, *TOKENS.encode("[go]"))
    # One request for the group.
    assert own.asked == [Request(group.prompt, 3, 0, 3, "train", goes_on=True)]


def test_later_turns_have_numbers_and_limits_of_their_own() -> None:
    own = Scripted("777", "8", "9")
    world = talker(says("a"), says("b"), Observation())
    play(own, world, replace(WIDE, tokens=9, turn_tokens=4), samples=2)
    assert [(each.stream, each.limit) for each in own.asked] == [
        ("train", 4),
        *((turn_stream("train", sample, 1), 4) for sample in (0, 1)),
        *((turn_stream("train", sample, 2), 3) for sample in (0, 1)),
    ]
    assert own.asked[3].prompt == (*PROMPT, *TOKENS.encode("777"), END, *TOKENS.encode("[a]8"),
                                   END, *TOKENS.encode("[b]"))  # fmt: skip


def test_long_words_are_cut_in_the_middle_and_say_so() -> None:
    """What the policy reads is shorter; what was said is recorded whole."""
    template = Words(TOKENS)
    heard: list[Any] = []
    template.bridge = lambda said: heard.extend(said) or (5, 6)  # type: ignore[method-assign]
    worlds = InlineWorlds(talker(says("a" * 30 + "b" * 30), Observation()))
    given = replace(WIDE, observation=9)
    players = Players(Scripted("1", "2"), worlds, template, TOKENS, given,
                      Sampling(max_tokens=60), "train")  # fmt: skip
    row = only(players.play_all([StartingPrompt({}, 0, 0, lambda first: PROMPT)], 1))
    assert heard == [{"role": "tool", "content": "aaaa\n[51 characters left out]\nbbbbb"}]
    assert row.episode is not None and len(row.episode.messages[1]["content"]) == 60


# --- why an episode ends --------------------------------------------------------------------------


def ending(said: Sequence[Any], **limits: Any) -> Any:
    given = EpisodeLimits(**{"tokens": 60, "context": 200, **limits})
    return only(play(Scripted("12", "34", "56"), talker(*said, whole=1.0), given, samples=1))


CALL = Call("f")
ENDS = [
    ("answered", [Observation()], {}, 1),
    ("done", [says("a"), says("b", done=True)], {}, 2),
    ("max_turns", [says("a"), says("b")], {"turns": 2}, 2),
    ("max_calls", [says("a", calls=(CALL,)), says("b", calls=(CALL, CALL))], {"calls": 2}, 2),
    ("own_tokens", [says("a")], {"tokens": 5}, 2),  # 3, then 2 of 3
    ("own_tokens", [says("a")], {"tokens": 3}, 1),  # none left behind a whole turn
    ("own_tokens", [], {"turn_tokens": 2}, 1),
    ("context", [], {"context": 5}, 1),  # the prompt has 3
    ("context", [says("a" * 20)], {"context": 20}, 1),  # what was said does not fit
    ("context", [says("a")], {"context": 9}, 1),  # nor a word behind it: 3 + 3 + 3
    ("error", [says("a"), ValueError("no")], {}, 2),
]


@pytest.mark.parametrize("stop, said, limits, turns", ENDS)
def test_every_end_is_known(stop: str, said: Any, limits: Any, turns: int) -> None:
    row = ending(said, **limits)
    assert row.episode.stop == stop and len(row.episode.turns) == turns
    assert row.turns[-1].role == "assistant"
    assert len(row.token_ids) + len(PROMPT) <= limits.get("context", 200)
    assert row.own_length <= limits.get("tokens", 60)
    assert row.episode.reward == (None if stop == "error" else 1.0)
    assert row.episode.reason == ("ValueError: no" if stop == "error" else "")


@pytest.mark.parametrize("stop, said, limits, turns", ENDS)
def test_what_an_end_means_is_a_setting(stop: str, said: Any, limits: Any, turns: int) -> None:
    cut = ending(said, truncated=frozenset({stop}), **limits)
    assert cut.truncated and not cut.episode.left_out
    out = ending(said, left_out=frozenset({stop}), **limits)
    assert not out.truncated and out.episode.left_out
    assert not ending(said, **limits).truncated  # in neither: graded as it is


def test_an_environment_that_takes_too_long_in_all() -> None:
    class Slow(InlineWorlds):
        def answers(self, wait: float) -> Any:
            return [(n, replace(answer, seconds=4.0)) for n, answer in super().answers(wait)]

    given = EpisodeLimits(60, 200, seconds=7.0)
    row = only(play(Scripted("1", "2", "3"), Slow(talker(says("a"), says("b"))), given, samples=1))
    assert row.episode is not None and row.episode.stop == "timeout"
    assert len(row.episode.turns) == 2 and "7 s in all" in row.episode.reason


class Moody(Adder):
    """Fails where it is told to, for one sample of three."""

    made = 0

    def reset(self, row: Mapping[str, Any]) -> Observation:
        Moody.made += 1
        if Moody.made % 3 == 1:
            raise OSError("no world")
        return super().reset(row)


def test_a_world_that_can_not_begin_costs_its_own_sample_alone() -> None:
    Moody.made = 0
    (group,) = play(Scripted("123", "456", "7"), Moody, samples=3)
    broken, *others = group.completions
    assert broken.episode is not None and broken.episode.stop == "error"
    assert broken.episode.reason == "OSError: no world" and len(broken.turns) == 1
    assert [x.episode and x.episode.stop for x in others] == ["done", "done"]


def test_who_is_over_before_the_first_word_is_an_error() -> None:
    row = only(play(Scripted("1"), talker(first=Observation(done=True)), samples=1))
    assert row.episode is not None and row.episode.stop == "error"


def test_different_beginnings_of_one_row_are_refused() -> None:
    """The environment draws without the row, or shares something between samples."""

    class Counting(Quiet):
        made = 0

        def reset(self, row: Mapping[str, Any]) -> Observation:
            type(self).made += 1
            return says(f"number {type(self).made}")

    with pytest.raises(WorldError, match="begins row 0 in two ways, 'number 1' and 'number 2'"):
        play(Scripted("1"), Counting)


def test_a_beginning_that_does_not_fit_is_refused() -> None:
    with pytest.raises(WorldError, match="has 53 tokens with the first words"):
        play(Scripted("1"), talker(first=says("a" * 48)), EpisodeLimits(10, 50))


def test_a_stranger_that_calls_itself_the_policy_is_not_learned() -> None:
    world = talker(Observation(({"role": "assistant", "content": "I am you"},)), Observation())
    row = only(play(Scripted("1", "2"), world, samples=1))
    assert [turn.role for turn in row.turns] == ["assistant", "environment", "assistant"]


# --- a real engine --------------------------------------------------------------------------------


def lively(**options: Any) -> Any:
    """A tiny model that ends a turn now and then."""
    return engine(eos=(END, 11, 23, 45, 60, 71), **options)


PROMPTS = [request(n + 4, 1, n).prompt for n in range(3)]


def test_the_speed_of_tools_changes_no_sample() -> None:
    given = replace(WIDE, tokens=40, turns=5, turn_tokens=9)
    plain = play(lively(slots=0), Adder, given, 3, PROMPTS)
    assert len({len(x.turns) for group in plain for x in group.completions}) > 1
    for seed in range(4):
        late = play(lively(slots=seed * 3), Shuffled(Adder, seed), given, 3, PROMPTS)
        for one, other in zip(plain, late, strict=True):
            assert one.prompt == other.prompt
            for a, b in zip(one.completions, other.completions, strict=True):
                assert same(a, b) and a.turns == b.turns
                assert without_clock(a) == without_clock(b)
    alone = play(lively(), Adder, given, 3, PROMPTS[:1])
    assert all(map(same, alone[0].completions, plain[0].completions))


def without_clock(row: Completion) -> Any:
    assert row.episode is not None
    turns = tuple(each._replace(seconds=0.0) for each in row.episode.turns)
    return replace(row.episode, turns=turns)


def test_recorded_probabilities_are_those_of_one_pass_over_the_row() -> None:
    own = lively()
    for group in play(own, Adder, replace(WIDE, turns=5, turn_tokens=9), 3, PROMPTS):
        for row in group.completions:
            asked = Request(group.prompt, 1, 0, 0)
            true_T = learner_logp(own.source.model, asked, row)
            own_T = row.mask_T if row.mask_T is not None else torch.ones(len(true_T)).bool()
            assert float((row.logp_T - true_T)[own_T].abs().max()) <= 1e-5
            assert row.mask_T is None or not row.logp_T[~own_T].any()


def test_one_turn_is_what_an_answer_is_without_an_environment() -> None:
    sampling = Sampling(max_tokens=30)
    played = play(lively(), Quiet, replace(WIDE, tokens=30), 4, PROMPTS, temperature=1.0)
    asked = [Request(prompt, 4, n, 3) for n, prompt in enumerate(PROMPTS)]
    for group, plain in zip(played, lively().generate(asked, sampling), strict=True):
        for a, b in zip(group.completions, plain, strict=True):
            assert same(a, b) or (b.finish == "length" and a.token_ids == b.token_ids)
            assert a.mask_T is None and a.turns == b.turns


def test_a_run_that_breaks_off_gives_everything_back() -> None:
    own, worlds = lively(), InlineWorlds(talker(says("a"), says("b"), says("c"), first=says("x")))

    def broken(messages: Any) -> Any:
        raise RuntimeError("no bridge")

    template = Words(TOKENS)
    template.bridge = broken  # type: ignore[method-assign]
    players = Players(own, worlds, template, TOKENS, WIDE, Sampling(max_tokens=60), "train")
    with pytest.raises(RuntimeError):
        players.play_all([StartingPrompt({}, 0, 0, lambda first: PROMPT)], 4)
    assert not worlds.there and not own.batches


# --- many conversations ---------------------------------------------------------------------------


class Babbling(BatchEngine):
    """Random tokens, end and stop tokens and special ones among them; it keeps what it wrote."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.wrote: dict[tuple[int, ...], tuple[int, ...]] = {}  # by all that stood before

    def answer(self, requests: Sequence[Request], sampling: Sampling) -> list[list[Completion]]:
        return [[self.one(x, sampling) for _ in range(x.samples)] for x in requests]

    def one(self, asked: Request, sampling: Sampling) -> Completion:
        most = min(asked.most(sampling), self.random.randint(1, 12))
        ids = [self.random.randrange(1, 97) for _ in range(most)]
        cut = most == asked.most(sampling) and self.random.random() < 0.3
        if not cut:
            ids[-1] = END
        self.wrote[asked.prompt] = tuple(ids)
        logp_T = -torch.tensor([float(x) for x in ids])
        return Completion(tuple(ids), logp_T, "length" if cut else "eos", 0)


class Chatter(Environment):
    """Says anything, an end token's text and a role's header among it, until it has enough."""

    def reset(self, row: Mapping[str, Any]) -> Observation:
        self.random = random.Random(row["n"])
        return says("begin") if self.random.random() < 0.5 else Observation()

    def step(self, text: str) -> Observation:
        words = ["<end>", "[user: ", "assistant", "é", "  ", "42", "reward=1"]
        said = "".join(self.random.choice(words) for _ in range(self.random.randint(1, 5)))
        over = self.random.random() < 0.2
        return Observation() if over else says(said, reward=self.random.choice([None, 0.5]))


def test_sampled_ids_are_trained_ids_are_ids_in_files(tmp_path: Path) -> None:
    """A thousand conversations: every own token is the sampler's, and nothing was encoded again."""
    own, template = Babbling(0), Words(TOKENS)
    prompts = [(1 + n % 90, 2, 3 + n // 90) for n in range(1000)]
    limits = EpisodeLimits(tokens=60, context=120, turns=6, truncated=frozenset(LIMITS))
    played = play(own, Chatter, limits, 1, prompts)
    rows = []
    for number, (prompt, group) in enumerate(zip(prompts, played, strict=True)):
        (done,) = group.completions
        before, said = list(group.prompt), iter(done.episode.messages if done.episode else ())
        assert group.prompt[: len(prompt)] == prompt
        for turn in done.turns:
            ids, message = done.token_ids[turn.start : turn.end], next(said)
            if turn.role == "assistant":
                assert own.wrote[tuple(before)] == ids
                assert done.logp_T[turn.start : turn.end].tolist() == [-float(x) for x in ids]
            else:
                assert ids == template.bridge([message])
            own_T = [True] * len(done.token_ids) if done.mask_T is None else done.mask_T.tolist()
            assert set(own_T[turn.start : turn.end]) == {turn.role == "assistant"}
            before += ids
        task = Task(number, "q", token_ids=group.prompt)
        rollout = Rollout(task, 3, 0, done, TOKENS.decode(done.token_ids), Grade(1.0))
        rows.append(Row.of(rollout, group=number, prompt_text="q"))
    rollouts.write(tmp_path / "a", rows, 1)
    for group, read in zip(played, groups_of(rollouts.read(tmp_path / "a")), strict=True):
        (done,), (back,) = group.completions, read
        assert back.completion.token_ids == done.token_ids and back.task.token_ids == group.prompt
        assert back.completion.turns == done.turns
        assert torch.equal(back.completion.logp_T, done.logp_T)
        given, kept = without_clock(done), without_clock(back.completion)
        assert replace(kept, messages=()) == replace(given, messages=())
        assert json.dumps(kept.messages) == json.dumps(given.messages)
    assert {x.completions[0].episode.stop for x in played} >= {"answered", "max_turns"}  # type: ignore[union-attr]
