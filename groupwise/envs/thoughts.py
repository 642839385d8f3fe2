"""Chat templates that drop the thoughts of earlier turns, made to keep them.

Models that reason are trained to write thoughts that the next prompt leaves out. In an episode
nothing is left out: what was sampled stays. Then the template says so, too, or the model that was
trained would be asked in another way than it learned.
"""

from __future__ import annotations

OPENS, CLOSES = "<think>", "</think>"
# Letters of nobody: they stand in for the tags while the template that drops them is at work.
HIDDEN = ("\U000f7a01think\U000f7a02", "\U000f7a03think\U000f7a04")
_BEFORE = (
    "{%- set kept = namespace(messages=[]) -%}{%- for message in messages -%}"
    "{%- if message.role == 'assistant' and message.content is string and not loop.last -%}"
    "{%- set kept.messages = kept.messages + [dict(message, content=message.content"
    f" | replace('{OPENS}', '{HIDDEN[0]}') | replace('{CLOSES}', '{HIDDEN[1]}'))] -%}}"
    "{%- else -%}{%- set kept.messages = kept.messages + [message] -%}{%- endif -%}"
    "{%- endfor -%}{%- set messages = kept.messages -%}"
    f"{{%- filter replace('{HIDDEN[0]}', '{OPENS}') | replace('{HIDDEN[1]}', '{CLOSES}') %}}"
)
_AFTER = "{% endfilter -%}"


def with_thoughts(template: str) -> str:
    """Return a chat template that writes earlier turns of the assistant with their thoughts.

    It is the same template for all else, and stands for itself: any tool that renders chat
    templates can use it. Only content that holds its thoughts as <think>...</think> keeps them; a
    last message of the assistant is written as before.
    """
    return _BEFORE + template.removesuffix("\n") + _AFTER
