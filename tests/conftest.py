"""Triton's kernels run in its interpreter where there is no GPU."""

from __future__ import annotations

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports Triton


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton 3.6 makes a range's bounds by int() of arrays, which NumPy 2.4 refuses."""
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        return
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patched(tensor: type, scope: object) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patched)
