"""Chat templates in the forms of well-known families, with tools, and tokenizers that fit them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from groupwise.model.formats.tokenizer import Tokenizer

TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}

_CALLS = (
    "{% for c in m.tool_calls or [] %}{{ '\n' }}<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n'
    "</tool_call>{% endfor %}"
)
_TOOL_TURNS = (  # answers of tools stand together in one turn of the user
    "{% elif m.role == 'tool' %}"
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}"
    "{{ '\n' }}<tool_response>\n{{ m.content }}\n</tool_response>"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}"
)
_TOOL_LIST = (
    "# Tools\n\n<tools>{% for t in tools %}\n{{ t | tojson }}{% endfor %}\n</tools>\n"
    'Write <tool_call>{"name": ..., "arguments": ...}</tool_call>.<|im_end|>\n'
)
QWEN25 = (
    "{% if tools %}<|im_start|>system\n"
    "{{ messages[0].content if messages[0].role == 'system' else 'You are helpful.' }}\n\n"
    + _TOOL_LIST
    + "{% elif messages[0].role != 'system' %}<|im_start|>system\nYou are helpful.<|im_end|>\n"
    "{% endif %}{% for m in messages %}"
    "{% if m.role == 'user' or (m.role == 'system' and not (loop.first and tools)) %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    "{% elif m.role == 'assistant' %}<|im_start|>assistant\n{{ m.content or '' }}"
    + _CALLS
    + "<|im_end|>\n"
    + _TOOL_TURNS
    + "{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Thoughts in front of the last question are dropped; those behind it stay.
QWEN3 = (
    "{% set ns = namespace(asked=-1) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.asked = loop.index0 %}{% endif %}{% endfor %}"
    "{% if tools %}<|im_start|>system\n"
    "{% if messages[0].role == 'system' %}{{ messages[0].content }}\n\n{% endif %}"
    + _TOOL_LIST
    + "{% endif %}{% for m in messages %}"
    "{% if m.role == 'user' or (m.role == 'system' and not (loop.first and tools)) %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    "{% elif m.role == 'assistant' %}{% set thought = '' %}{% set said = m.content or '' %}"
    "{% if '</think>' in said %}"
    "{% set thought = said.split('</think>')[0].split('<think>')[-1].strip('\n') %}"
    "{% set said = said.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "<|im_start|>assistant\n"
    "{% if loop.index0 > ns.asked and (loop.last or thought) %}<think>\n{{ thought }}\n</think>\n\n"
    "{% endif %}{{ said }}" + _CALLS + "<|im_end|>\n" + _TOOL_TURNS + "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{% set first = 1 if messages[0].role == 'system' else 0 %}"
    "<|start_header_id|>system<|end_header_id|>\n\n{% if tools %}Environment: ipython\n{% endif %}"
    "Knowledge ends in 2023.\n\n{{ messages[0].content | trim if first else '' }}<|eot_id|>"
    "{% for m in messages[first:] %}{% if m.role in ('tool', 'ipython') %}"
    "<|start_header_id|>ipython<|end_header_id|>\n\n{{ m.content | tojson }}<|eot_id|>"
    "{% elif m.tool_calls %}<|start_header_id|>assistant<|end_header_id|>\n\n"
    '{"name": "{{ m.tool_calls[0].function.name }}", '
    '"parameters": {{ m.tool_calls[0].function.arguments | tojson }}}<|eot_id|>'
    "{% else %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
    "{% if loop.first and tools %}Call with a name and its parameters:\n"
    "{% for t in tools %}{{ t | tojson }}\n\n{% endfor %}{% endif %}"
    "{{ m.content | trim }}<|eot_id|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
# Tools, and what the system says, stand in front of the last question alone; answers of tools
# want a call before them.
MISTRAL = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{% set brief = messages[0].content %}"
    "{% set rest = messages[1:] %}{% else %}{% set rest = messages %}{% endif %}"
    "{% set ns = namespace(asked=-1, calls=0) %}{% for m in rest %}{% if m.role == 'user' %}"
    "{% set ns.asked = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in rest %}{% if m.role == 'user' %}"
    "{% if tools and loop.index0 == ns.asked %}"
    "[AVAILABLE_TOOLS] {{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
    "[INST] {% if brief is defined and loop.index0 == ns.asked %}{{ brief }}\n\n{% endif %}"
    "{{ m.content }}[/INST]"
    "{% elif m.tool_calls %}{% set ns.calls = m.tool_calls | length %}[TOOL_CALLS] ["
    "{% for c in m.tool_calls %}{% if c.id is not defined or c.id | length != 9 %}"
    "{{ raise_exception('call ids have nine letters') }}{% endif %}"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}, '
    '"id": "{{ c.id }}"}{{ ", " if not loop.last }}{% endfor %}]{{ eos_token }}'
    "{% elif m.role == 'assistant' %} {{ m.content }}{{ eos_token }}"
    "{% elif m.role == 'tool' %}{% if ns.calls == 0 %}"
    "{{ raise_exception('an answer of a tool without a call') }}{% endif %}"
    "{% set ns.calls = ns.calls - 1 %}"
    '[TOOL_RESULTS] {"content": {{ m.content | tojson }}, "call_id": "{{ m.tool_call_id }}"}'
    "[/TOOL_RESULTS]{% else %}{{ raise_exception('no such role') }}{% endif %}{% endfor %}"
)
SMOLLM2 = (
    "{% for m in messages %}{% if loop.first and m.role != 'system' %}"
    "<|im_start|>system\nYou are a helpful model.<|im_end|>\n{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PHI = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}"
    "{{ raise_exception('the system has no role') }}{% endif %}{% for m in messages %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}<start_of_turn>"
    "{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}<end_of_turn>\n"
    "{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
DEEPSEEK = (  # a prompt opens the thought, and history drops it
    "{{ bos_token }}{% set ns = namespace(tool=false) %}{% for m in messages %}"
    "{% if m.role == 'system' %}{{ m.content }}"
    "{% elif m.role == 'user' %}{% set ns.tool = false %}<｜User｜>{{ m.content }}"
    "{% elif m.role == 'assistant' %}{% set said = m.content or '' %}"
    "{% if '</think>' in said %}{% set said = said.split('</think>')[-1] %}{% endif %}"
    "{% if ns.tool %}<｜tool▁outputs▁end｜>{% else %}<｜Assistant｜>{% endif %}{{ said }}"
    "{% set ns.tool = false %}<｜end▁of▁sentence｜>"
    "{% elif m.role == 'tool' %}{% if not ns.tool %}<｜tool▁outputs▁begin｜>{% endif %}"
    "{% set ns.tool = true %}<｜tool▁output▁begin｜>{{ m.content }}<｜tool▁output▁end｜>{% endif %}"
    "{% endfor %}{% if ns.tool %}<｜tool▁outputs▁end｜>"
    "{% elif add_generation_prompt %}<｜Assistant｜><think>\n{% endif %}"
)
GPT_OSS = (
    "<|start|>system<|message|>You are a model.<|end|>"
    "{% if tools %}<|start|>developer<|message|># Tools\n{{ tools | tojson }}<|end|>{% endif %}"
    "{% set ns = namespace(name='') %}{% for m in messages %}"
    "{% if m.role == 'assistant' and m.tool_calls %}"
    "{% set ns.name = m.tool_calls[0].function.name %}"
    "<|start|>assistant to=functions.{{ ns.name }}<|channel|>commentary json<|message|>"
    "{{ m.tool_calls[0].function.arguments | tojson }}<|call|>"
    "{% elif m.role == 'assistant' %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}"
    "{% if loop.last and not add_generation_prompt %}<|return|>{% else %}<|end|>{% endif %}"
    "{% elif m.role == 'tool' %}{% if not ns.name %}"
    "{{ raise_exception('an answer of a tool without a call') }}{% endif %}"
    "<|start|>functions.{{ ns.name }} to=assistant<|channel|>commentary<|message|>"
    "{{ m.content | tojson }}<|end|>"
    "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
LLAMA2 = (  # headers in plain letters, and a BOS for every question
    "{% if messages[0].role == 'system' %}{% set brief = messages[0].content %}"
    "{% set rest = messages[1:] %}{% else %}{% set rest = messages %}{% endif %}"
    "{% for m in rest %}{% if m.role == 'user' %}{{ bos_token }}[INST] "
    "{% if loop.first and brief is defined %}<<SYS>>\n{{ brief }}\n<</SYS>>\n\n{% endif %}"
    "{{ m.content | trim }} [/INST]{% elif m.role == 'assistant' %} {{ m.content | trim }} "
    "{{ eos_token }}{% else %}{{ raise_exception('no such role') }}{% endif %}{% endfor %}"
)
VICUNA = (  # plain letters throughout, but for the end
    "{% for m in messages %}{% if m.role == 'user' %}USER: {{ m.content }} ASSISTANT:"
    "{% elif m.role == 'system' %}{{ m.content }} "
    "{% else %} {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
)


@dataclass(frozen=True)
class Form:
    """A family's template, with the tokens that it needs."""

    template: str
    special: tuple[str, ...]
    ends: tuple[str, ...]
    bos: str = ""
    pieces: bool = False  # a vocabulary in the manner of SentencePiece, else bytes
    plain: tuple[str, ...] = ()  # added tokens that are not special
    roles: tuple[str, ...] = ("user", "tool")  # that follow a turn as they should
    system: bool = True  # whether a system message changes nothing of that
    lead: str = ""  # what the template writes in front of the assistant's words
    trail: str = ""  # and behind them


_IM = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
_TAGS = ("<tool_call>", "</tool_call>", "<think>", "</think>")
_DEEP = tuple(
    f"<｜{name}｜>"
    for name in (
        "User",
        "Assistant",
        "end▁of▁sentence",
        "begin▁of▁sentence",
        "tool▁outputs▁begin",
        "tool▁outputs▁end",
        "tool▁output▁begin",
        "tool▁output▁end",
    )
)
_INST = ("[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]")
FORMS = {
    "qwen25": Form(QWEN25, _IM, ("<|im_end|>", "<|endoftext|>"), plain=_TAGS[:2]),
    "qwen3": Form(QWEN3, _IM, ("<|im_end|>",), plain=_TAGS, roles=("tool",)),
    "llama3": Form(
        LLAMA3,
        ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        ("<|eot_id|>",),
        "<|begin_of_text|>",
    ),
    "mistral": Form(
        MISTRAL,
        ("<s>", "</s>", *_INST, "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
        ("</s>",),
        "<s>",
        pieces=True,
        lead=" ",
    ),
    "smollm2": Form(SMOLLM2, _IM, ("<|im_end|>",), "<|im_start|>"),
    "phi": Form(PHI, ("<|user|>", "<|assistant|>", "<|tool|>", "<|end|>"), ("<|end|>",)),
    "gemma": Form(
        GEMMA,
        ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"),
        ("<eos>", "<end_of_turn>"),
        "<bos>",
        roles=("user",),
        system=False,
    ),
    "deepseek": Form(DEEPSEEK, _DEEP, (_DEEP[2],), _DEEP[3], plain=_TAGS[2:], roles=()),
    "gpt_oss": Form(
        GPT_OSS,
        ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|return|>", "<|call|>"),
        ("<|return|>", "<|call|>"),
        roles=("tool",),
    ),
    "llama2": Form(
        LLAMA2, ("<s>", "</s>"), ("</s>",), "<s>", pieces=True, roles=("user",), lead=" ", trail=" "
    ),
    "vicuna": Form(VICUNA, ("</s>",), ("</s>",), pieces=True, roles=("user",), lead=" "),
}
MERGES = ("\n\n", "  ", " [", "]:", "us", "er", "user", " a", "\n<", ">\n", "</", "}\n", '."')


def tokenizer_of(form: Form, merges: Sequence[str] = MERGES) -> Tokenizer:
    """Make a small tokenizer with the tokens of a form."""
    backend = _pieces(merges) if form.pieces else _bytes(merges)
    # Phi's special tokens take white space behind them along.
    eats = "<|end|>" in form.special and "<|user|>" in form.special
    backend.add_special_tokens(
        [AddedToken(text, special=True, normalized=False, rstrip=eats) for text in form.special]
    )
    backend.add_tokens([AddedToken(text, normalized=False) for text in form.plain])
    names = {"eos_token": form.ends[0], **({"bos_token": form.bos} if form.bos else {})}
    return Tokenizer(
        backend,
        eos_ids=[backend.token_to_id(end) for end in form.ends],
        bos_id=backend.token_to_id(form.bos) if form.bos else None,
        template=form.template,
        names=names,
    )


def _merged(letters: Sequence[str], spelled: Sequence[str]) -> models.BPE:
    """Make a vocabulary of letters and of words that pairs of letters are merged into."""
    vocabulary = {letter: at for at, letter in enumerate(letters)}
    merges: list[tuple[str, str]] = []
    for word in spelled:
        for end in range(2, len(word) + 1):
            if word[:end] not in vocabulary:
                vocabulary[word[:end]] = len(vocabulary)
                merges.append((word[: end - 1], word[end - 1]))
    return models.BPE(vocab=vocabulary, merges=merges)


def _bytes(merges: Sequence[str]) -> Backend:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    spelled = [word.replace(" ", "Ġ").replace("\n", "Ċ") for word in merges]
    backend = Backend(_merged(letters, spelled))
    cut = pre_tokenizers.Split(Regex(r"\s+|\w+|[^\s\w]+"), behavior="isolated")
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([cut, level])
    backend.decoder = decoders.ByteLevel()
    return backend


def _pieces(merges: Sequence[str]) -> Backend:
    """Make a vocabulary that writes spaces as ▁, one in front of a text, and bytes if need be."""
    letters = [f"<0x{number:02X}>" for number in range(256)]
    letters += ["▁", *(chr(number) for number in range(33, 127))]
    model = _merged(letters, [word.replace(" ", "▁") for word in merges if "\n" not in word])
    model.byte_fallback = True
    backend = Backend(model)
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return backend
