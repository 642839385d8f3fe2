"""For all tests: one thread, nothing left behind; Triton's interpreter where there is no GPU."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from skipped import not_tried

import groupwise.recipes  # noqa: F401 - what is built in is there before the first test
from groupwise.common import progress
from groupwise.methods.slots import REGISTRY
from groupwise.model.tiles import avoid_broken_tiles
from groupwise.prepare import placing
from groupwise.recipes import RECIPES

# One thread each: tests run side by side, and sums are the same on any number of cores.
torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")  # for the processes that tests start
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # they would compile all modules anew, each

avoid_broken_tiles()  # before the first product

# What is under way is not shown: whether a test waits depends on how busy the machine is.
progress.LIVE_AFTER = progress.FIRST_AFTER = math.inf

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports Triton


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Say what was not tried, for want of what: a green run must not look like more than it is."""
    reports = terminalreporter.stats.get("skipped", [])
    reasons = Counter(not_tried(report.longrepr[2]) for report in reports)
    if reasons:
        terminalreporter.section("not tried")
    for reason, count in reasons.most_common():
        terminalreporter.write_line(f"{count:5}  {reason}")


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mend Triton's interpreter: ranges whose bounds are arrays, sums that know their company, and
    8-bit floats, where it loses a carry into the exponent.

    Triton 3.6 makes a range's bounds by int() of arrays, which NumPy 2.4 refuses. Its products are
    NumPy's, whose last bits depend on the shape of the whole on some processors; a row of a real
    `tl.dot` does not. In float64 the sums of a tile are the same to the last bit of float32.
    """
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        return
    from triton.runtime import interpreter

    def dot(self: object, a: Any, b: Any, d: Any, *precision: object) -> Any:
        tile = np.matmul(a.data, b.data, dtype=np.float64).astype(d.data.dtype)
        return interpreter.TensorHandle(tile + d.data, d.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", dot)

    convert, kind = interpreter._convert_float, interpreter.tl.float8e4nv

    def converted(x: Any, before: Any, after: Any, rounding: Any) -> Any:
        if after != kind or before != interpreter.tl.float32:
            return convert(x, before, after, rounding)
        wide = torch.from_numpy(np.ascontiguousarray(x)).clamp(-448, 448)
        return wide.to(torch.float8_e4m3fn).view(torch.uint8).numpy()

    monkeypatch.setattr(interpreter, "_convert_float", converted)

    patch = interpreter._patch_lang_tensor

    def patched(tensor: type, scope: object) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patched)


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless a test names a device: its numbers must not depend on what a machine has."""
    monkeypatch.setattr(placing, "_idle", lambda: "")


@pytest.fixture(autouse=True)
def registries() -> Iterator[None]:
    """What a plug-in adds is gone after the test, and so are the threads that a run set."""
    recipes, slots = dict(RECIPES), {kind: dict(known) for kind, known in REGISTRY.items()}
    yield
    RECIPES.clear()
    RECIPES.update(recipes)
    for kind, known in slots.items():
        REGISTRY[kind].clear()
        REGISTRY[kind].update(known)
    torch.set_num_threads(1)
