"""A process that renders chat templates, within limits that no template can talk its way around.

A template is a program that came with a model. Jinja's sandbox keeps it from the machine, not from
counting for ever or filling the memory; only the limits of a process of its own do that. It is
started by rendering.py, as a script: nothing of the package is imported here, so it starts quickly
and stays small.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import pickle
import resource
import struct
import sys
import time
from typing import Any

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

SECONDS = 3  # of the processor for one conversation, whose template takes a ten-thousandth
MEMORY = 2**30  # bytes
MOST_CHARACTERS = 2**25  # of the text: more than any context holds
HEAD = struct.Struct("<?Q")  # of a reply: whether it is the text, and how many bytes follow


class _Generation(Extension):
    """{% generation %} marks the assistant's text, for whoever passes what to mark it with.

    Without the two variables that it writes around the text, it is only text.
    """

    tags = {"generation"}  # noqa: RUF012, jinja2 declares it so

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        begin, end = (
            jinja2.nodes.Output([jinja2.nodes.Name(name, "load", lineno=line)], lineno=line)
            for name in ("generation_begins", "generation_ends")
        )
        return [begin, *body, end]


@functools.lru_cache(maxsize=16)
def _compiled(template: str) -> jinja2.Template:
    """Compile in the environment that templates are written for (transformers'), without the clock.

    `strftime_now` stays undefined: templates that test for it fall back to a fixed date, and a
    prompt is the same tomorrow, which resuming a run relies on.
    """
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    return environment.from_string(template)


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def render(template: str, variables: dict[str, Any]) -> tuple[bool, str]:
    """Return the text and true, or what went wrong and false."""
    pieces, length = [], 0
    try:
        for piece in _compiled(template).generate(**variables):
            pieces.append(piece)
            length += len(piece)
            if length > MOST_CHARACTERS:
                return False, f"it writes more than {MOST_CHARACTERS:,} characters"
    except jinja2.TemplateError as error:
        return False, str(error)
    except MemoryError:
        return False, f"it needs more than {MEMORY // 2**20:,} MiB of memory"
    except Exception as error:  # of the template, whatever it is
        return False, f"{type(error).__name__}: {error}"
    return True, "".join(pieces)


def _allow(seconds: int) -> None:
    """Let the processor work so much longer from now on; the system ends what goes beyond."""
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(time.process_time()) + seconds, hard))


def main() -> None:
    asked, replies = sys.stdin.buffer, sys.stdout.buffer
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(ValueError, OSError):  # macOS has no such limit
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    while asked.peek(1):  # type: ignore[union-attr]
        template, variables = pickle.load(asked)
        _allow(SECONDS)
        done, text = render(template, variables)
        raw = text.encode("utf-8", "surrogatepass")
        replies.write(HEAD.pack(done, len(raw)) + raw)
        replies.flush()


if __name__ == "__main__":
    main()
