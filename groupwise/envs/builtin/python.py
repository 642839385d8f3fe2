"""A Python tool: a program runs in the sandbox that programs are graded in, and says what it
printed. Nothing is kept from one call to the next.
"""

from __future__ import annotations

import ast
import asyncio
from collections.abc import Callable, Coroutine
from functools import lru_cache
from typing import Any

from groupwise.envs.toolbox import ToolFailed
from groupwise.errors import WorldError


def python(
    seconds: float = 10.0, memory: int = 512, isolation: str = "", sandboxes: int = 0
) -> Callable[..., Coroutine[Any, Any, str]]:
    """Make the tool. `seconds` of the clock and `memory` in MiB hold for each program."""
    from groupwise.graders.sandbox.isolation import SandboxError  # Linux alone: it says so
    from groupwise.graders.sandbox.limits import Limits
    from groupwise.graders.sandbox.pool import choose
    from groupwise.graders.sandbox.worker import Ran, Sandbox

    limits = Limits(seconds=seconds, memory=memory, output=64)
    try:
        choose(isolation)  # tried once, in the process that workers are forked from
    except SandboxError as error:
        raise WorldError(str(error)) from None

    def work(sandbox: Sandbox, code: str) -> Ran:
        return sandbox.script(code, "", limits)

    async def run(code: str) -> str:
        """Run a Python program and return what it prints. Nothing is kept between calls.

        Args:
            code: The whole program. Its last line is printed if it is an expression.
        """
        try:
            pool = _pool(isolation, sandboxes)
            ran = await asyncio.to_thread(pool.run, work, _printing(code))
        except SandboxError as error:
            raise ToolFailed(f"no sandbox could run it: {error}") from None
        if ran.why:
            raise ToolFailed(f"{ran.why}\n{ran.output}".strip())
        return ran.output

    run.__name__ = "python"
    run.keeps_time = True  # type: ignore[attr-defined]  # a sandbox has its own clock
    return run


@lru_cache(maxsize=1)
def _pool(isolation: str, sandboxes: int) -> Any:
    from groupwise.graders.sandbox.pool import SandboxPool

    return SandboxPool(isolation, size=sandboxes or None)


def _printing(code: str) -> str:
    """Return the program with its last line printed if it is an expression, as in a notebook."""
    try:
        tree = ast.parse(code)
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return code  # it says itself what is wrong
    if not tree.body or not isinstance(last := tree.body[-1], ast.Expr):
        return code
    if isinstance(last.value, ast.Call) and getattr(last.value.func, "id", "") == "print":
        return code
    before = "".join(code.splitlines(keepends=True)[: last.lineno - 1])
    own = ast.unparse(last.value)
    return f"{before}__last = ({own})\nif __last is not None: print(__last)\n"
