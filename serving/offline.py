"""SGLang inside this process, with a draft or without: for measurements, not for serving."""

from __future__ import annotations

import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from serving.measure import Answer
from serving.version import require_sglang

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class OfflineSettings:
    """What an engine is started with; two that differ in `draft_path` alone may be compared."""

    target_path: str
    draft_path: str = ""
    """Empty lets the target decode alone."""
    dtype: str = "bfloat16"
    tp_size: int = 1
    context_length: int = 8192
    """Longest prompt and answer together, tokens."""
    max_running_requests: int = 64
    attention_backend: str = ""
    """Empty leaves it to SGLang."""
    memory_fraction: float = 0.8
    cuda_graph_batch_sizes: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)


def offline_arguments(settings: OfflineSettings) -> dict[str, Any]:
    """SGLang's own arguments for these settings."""
    arguments: dict[str, Any] = {
        "model_path": settings.target_path,
        "dtype": settings.dtype,
        "tp_size": settings.tp_size,
        "context_length": settings.context_length,
        "max_running_requests": settings.max_running_requests,
        "mem_fraction_static": settings.memory_fraction,
        "cuda_graph_bs_decode": list(settings.cuda_graph_batch_sizes),
        "disable_prefill_cuda_graph": True,
        "disable_radix_cache": True,
        "skip_tokenizer_init": True,
        "grammar_backend": "none",
        "sampling_backend": "pytorch",
        "log_level": "warning",
    }
    if settings.draft_path:
        arguments["speculative_algorithm"] = "DSPARK"
        arguments["speculative_draft_model_path"] = settings.draft_path
    if settings.attention_backend:
        arguments["attention_backend"] = settings.attention_backend
    return arguments


class OfflineEngine:
    """A running engine; use as a context manager in a main thread.

    Raises ValueError for another SGLang than the supported one.
    """

    def __init__(self, settings: OfflineSettings, eos_token_ids: Sequence[int]) -> None:
        require_sglang()
        from sglang import Engine

        self._eos_token_ids = list(eos_token_ids)
        started = time.monotonic()
        self._engine = Engine(**offline_arguments(settings))
        self.start_seconds = time.monotonic() - started

    def __enter__(self) -> OfflineEngine:
        return self

    def __exit__(self, *exception: object) -> None:
        self._engine.shutdown()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Wait for asynchronous work on the engine's own loop."""
        return self._engine.loop.run_until_complete(work)

    async def decode(
        self, token_ids: Sequence[int], temperature: float, max_new_tokens: int
    ) -> Answer:
        """One answer, streamed for its times.

        Raises ValueError if SGLang gives the request up.
        """
        asked = time.monotonic()
        stream = await self._engine.async_generate(
            input_ids=list(token_ids),
            sampling_params={
                "temperature": temperature,
                "max_new_tokens": max_new_tokens,
                "stop_token_ids": self._eos_token_ids,
            },
            stream=True,
        )
        first, last, answer = 0.0, 0.0, None
        async for part in stream:
            last = time.monotonic()
            first = first or last
            answer = part
        reason = {} if answer is None else answer["meta_info"].get("finish_reason") or {}
        if answer is None or reason.get("type") not in ("stop", "length"):
            raise ValueError(f"SGLang gave a request up: {reason}")
        return Answer(answer["meta_info"], asked, first, last)
