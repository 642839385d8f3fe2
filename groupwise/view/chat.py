"""A prompt's turns, recognised by the marks that chat templates write.

For reading only. The completion is never taken apart by such marks: a policy that writes them must
not look like a user. Its turns are those that the rollout file has.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

LONG = 40  # characters that prompts begin with alike, and that are not shown again and again


class Said(NamedTuple):
    """The words of one role."""

    role: str  # system, user, assistant, tool, ...; "" for text outside any turn
    text: str


# Each finds where a turn begins; `role` names it, and the turn goes up to its end mark.
_STYLES = (
    (r"<\|im_start\|>(?P<role>\w+)\n", r"<\|im_end\|>\n?"),  # ChatML: Qwen, SmolLM
    (r"<\|start_header_id\|>(?P<role>\w+)<\|end_header_id\|>\n\n", r"<\|eot_id\|>"),  # Llama 3
    (r"<start_of_turn>(?P<role>\w+)\n", r"<end_of_turn>\n?"),  # Gemma
    (r"<\|(?P<role>system|user|assistant)\|>\n?", r"<\|end\|>\n?|</s>\n?|<\|endoftext\|>"),  # Phi
    (r"<｜(?P<role>User|Assistant)｜>", r"<｜end▁of▁sentence｜>"),  # DeepSeek
    (r"(?P<role>\[INST\]|\[/INST\]) ?", r"</s>"),  # Mistral
)
_ROLES = {"[INST]": "user", "[/INST]": "assistant", "model": "assistant"}


def turns(prompt: str) -> list[Said]:
    """Return turns in order; a prompt without marks is one turn without a role."""
    used = [(begin, end) for begin, end in _STYLES if re.search(begin, prompt)]
    if not used:
        return [Said("", prompt)]
    begin, end = used[0]
    starts = list(re.finditer(begin, prompt))
    found = [Said("", prompt[: starts[0].start()])]
    for at, start in enumerate(starts):
        stop = starts[at + 1].start() if at + 1 < len(starts) else len(prompt)
        said, *rest = re.split(end, prompt[start.end() : stop], maxsplit=1)
        role = start["role"]
        found += [Said(_ROLES.get(role, role.lower()), said), Said("", "".join(rest))]
    return [turn for turn in found if turn.text.strip()]


def own_words(prompts: Sequence[str]) -> list[str]:
    """Return what tells prompts apart: the last turn of a user, or what comes behind a beginning
    that all of them have.
    """
    told = [turns(prompt) for prompt in prompts]
    if all(any(turn.role == "user" for turn in each) for each in told):
        return [[turn.text for turn in each if turn.role == "user"][-1].strip() for each in told]
    common = 0
    if len(set(prompts)) > 1:
        alike = zip(*prompts, strict=False)
        common = next((at for at, letters in enumerate(alike) if len(set(letters)) > 1), LONG)
    start = max((match.end() for match in re.finditer(r"\s", prompts[0][:common])), default=0)
    return [prompt[start if start >= LONG else 0 :] for prompt in prompts]


def thought_and_answer(completion: str) -> tuple[str, str]:
    """Split at the end of thinking into thought and answer; no mark, no thought."""
    thought, mark, answer = completion.partition("</think>")
    return (thought.removeprefix("<think>"), answer) if mark else ("", completion)
