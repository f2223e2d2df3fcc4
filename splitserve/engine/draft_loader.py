"""Puts other weights into the draft of a running SGLang engine.

SGLang calls `load` in every tensor-parallel rank, between two forward passes, as the custom weight
loader of an update. What it is handed only names the draft; the weights come from the exchange
buffer that the trainers fill on the device, or, when that holds another version, from a folder in
export format.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

import torch

from splitserve.engine.control import ControlBlock, DraftSource
from splitserve.engine.plugin import ENVIRONMENT, CaptureConfig, tensor_parallel_rank

LOADER = "splitserve.engine.draft_loader.load"
_SEPARATOR = "|"


def draft_tag(step: int, folder: str) -> str:
    """The name under which an update travels through SGLang."""
    return _SEPARATOR.join(["splitserve-draft", str(step), folder])


def update_messages(step: int, folder: str, num_ranks: int) -> list[bytes]:
    """What SGLang is handed for an update, one for each tensor-parallel rank."""
    from sglang.srt.utils import MultiprocessingSerializer

    tagged = [(draft_tag(step, folder), torch.zeros(1))]
    # Not the same one for all: the first rank to read a tensor takes its memory along.
    return [MultiprocessingSerializer.serialize(tagged) for _ in range(num_ranks)]


def load(model: Any, named_tensors: list[tuple[str, torch.Tensor]]) -> None:
    """Load the draft that the one tensor's name asks for into SGLang's draft model."""
    _, step, folder = named_tensors[0][0].split(_SEPARATOR, 2)
    source = load_draft(model, int(step), folder, _exchange())
    if tensor_parallel_rank() == 0:
        _control().note_draft(int(step), source)


def load_draft(model: Any, step: int, folder: str, exchange: Any | None) -> DraftSource:
    """Give the model the weights of that step and forget what was derived from the old ones.

    Args:
        model: SGLang's draft model; its `load_weights` takes (name, tensor) pairs.
        exchange: an attached `DraftExchange`, or None.

    Raises:
        ValueError: the exchange does not hold the step and the folder has no weights.
    """
    source = DraftSource.FOLDER
    tensors = None if exchange is None else exchange.get(step)
    if exchange is not None and tensors is not None:
        model.load_weights(list(tensors.items()))
        if torch.cuda.is_available():
            # The trainers may begin the next version once these copies have been made.
            torch.cuda.current_stream().synchronize()
        if exchange.still(step):
            source = DraftSource.DEVICE
    if source is not DraftSource.DEVICE:
        model.load_weights(_read(folder))
    forget_derived(model)
    return source


def forget_derived(model: Any) -> None:
    """Drop SGLang's copies of K/V weights, which it never renews (SGLang 0.5.23)."""
    if hasattr(model, "_fused_kv_write_cache"):
        model._fused_kv_write_cache = None
    if hasattr(model, "_stacked_ctx_kv_cache"):
        del model._stacked_ctx_kv_cache


def _read(folder: str) -> list[tuple[str, torch.Tensor]]:
    from safetensors.torch import load_file

    files = sorted(Path(folder).glob("*.safetensors"))
    if not files:
        raise ValueError(f"draft {folder!r} has no weights; allowed: an exported draft")
    return [item for file in files for item in load_file(file).items()]


@functools.cache
def _config() -> CaptureConfig:
    return CaptureConfig.from_json(os.environ[ENVIRONMENT])


@functools.cache
def _control() -> ControlBlock:
    return ControlBlock.attach(_config().control)


@functools.cache
def _exchange() -> Any | None:
    from splitserve.transport.weights import DraftExchange, ExchangeAddress

    text = _config().exchange
    if not text:
        return None
    device = f"cuda:{torch.cuda.current_device()}" if torch.cuda.is_available() else "cpu"
    return DraftExchange.attach(ExchangeAddress.from_json(text), device)
