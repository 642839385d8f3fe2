"""A prompt's turns, recognised by the marks that chat templates write.

For reading only. The completion is never taken apart by such marks: a policy that writes them must
not look like a user. Its turns are those that the rollout file has.
"""

from __future__ import annotations

import re
from typing import NamedTuple


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


def thought_and_answer(completion: str) -> tuple[str, str]:
    """Split at the end of thinking into thought and answer; no mark, no thought."""
    thought, mark, answer = completion.partition("</think>")
    return (thought.removeprefix("<think>"), answer) if mark else ("", completion)
