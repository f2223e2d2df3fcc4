"""Kernels in tests: on the GPU, or in Triton's interpreter without one."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest
import torch

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")


@contextmanager
def triton_module(name: str) -> Iterator[ModuleType]:
    """A module of kernels by its name; without a GPU a copy of it for the interpreter.

    Triton chooses when a kernel is decorated. A copy leaves the choice of other tests alone, and
    does not depend on what they imported. Processes that are started meanwhile interpret, too.
    """
    if CUDA:
        yield importlib.import_module(name)
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        yield copy_module(name, patch)


def copy_module(name: str, patch: pytest.MonkeyPatch) -> ModuleType:
    """The module once more, by another name."""
    found = importlib.util.find_spec(name)
    assert found is not None and found.origin is not None
    copied = f"interpreted_{name.rpartition('.')[2]}"
    spec = importlib.util.spec_from_file_location(copied, found.origin)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    patch.setitem(sys.modules, copied, module)
    spec.loader.exec_module(module)
    return module


def fill_with_nan(patch: pytest.MonkeyPatch) -> None:
    """torch.empty and empty_like give NaN, so that nothing unwritten is read or returned."""
    empty = torch.empty

    def nan_empty(*size: Any, **options: Any) -> torch.Tensor:
        made = empty(*size, **options)
        return made.fill_(float("nan")) if made.is_floating_point() else made

    patch.setattr(torch, "empty", nan_empty)
    patch.setattr(torch, "empty_like", lambda t: nan_empty(t.shape, dtype=t.dtype, device=t.device))
