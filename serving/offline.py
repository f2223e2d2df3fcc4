"""SGLang inside this process, with a draft or without: for measurements, not for serving."""

from __future__ import annotations

import os
import time
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from serving.facts import Gpu
from serving.launch_spec import Launch, Setting
from serving.leftovers import EngineRemains
from serving.measure import Answer, Ask, Stream, record_stream
from serving.profiles import MEASURING, Profile, Request, build_launch
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


def offline_launch(settings: OfflineSettings) -> Launch:
    """The start of an engine with these settings.

    Raises:
        ValueError: the draft does not meet SGLang's contract for that target.
    """
    request = Request(
        Profile.DSPARK_STATIC if settings.draft_path else Profile.PLAIN,
        settings.target_path,
        settings.draft_path,
        gpu=Gpu.OTHER,
        tp_size=settings.tp_size,
        context_length=settings.context_length,
    )
    values: dict[str, Any] = {
        "dtype": settings.dtype,
        "max_running_requests": settings.max_running_requests,
        "mem_fraction_static": settings.memory_fraction,
        "cuda_graph_bs_decode": settings.cuda_graph_batch_sizes,
    }
    if settings.attention_backend:
        values["attention_backend"] = settings.attention_backend
    asked = [Setting(name, value, "asked for") for name, value in values.items()]
    return build_launch(request).plus([*MEASURING, *asked])


def offline_arguments(settings: OfflineSettings) -> dict[str, Any]:
    """SGLang's own arguments for these settings."""
    return offline_launch(settings).argument_dict()


class OfflineEngine:
    """A running engine; use as a context manager in a main thread.

    Raises ValueError for another SGLang than the supported one.
    """

    def __init__(self, start: Launch | OfflineSettings, eos_token_ids: Sequence[int] = ()) -> None:
        require_sglang()
        launch = start if isinstance(start, Launch) else offline_launch(start)
        self._eos_token_ids = tuple(eos_token_ids)
        started = time.monotonic()
        with _variables(launch.environment_dict()):
            from sglang import Engine

            self._engine = Engine(**launch.argument_dict())
        self._remains = EngineRemains(self._engine)
        self.start_seconds = time.monotonic() - started

    def __enter__(self) -> OfflineEngine:
        return self

    def __exit__(self, *exception: object) -> None:
        self._remains.end()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Wait for asynchronous work on the engine's own loop."""
        return self._engine.loop.run_until_complete(work)

    async def decode(
        self, token_ids: Sequence[int], temperature: float, max_new_tokens: int
    ) -> Answer:
        """One answer, streamed for its times.

        Raises ValueError if SGLang gives the request up.
        """
        return await self.ask(
            Ask(tuple(token_ids), temperature, max_new_tokens, stop_token_ids=self._eos_token_ids)
        )

    async def ask(self, ask: Ask) -> Answer:
        """One answer, streamed for its times. Raises ValueError if SGLang gives it up."""

        async def stream() -> Stream:
            parts = await self._engine.async_generate(
                input_ids=list(ask.token_ids), sampling_params=ask.sampling(), stream=True
            )
            async for part in parts:
                yield part

        return await record_stream(stream())

    async def info(self) -> dict[str, Any]:
        """SGLang's resolved arguments, and its state under `internal_states`."""
        manager = self._engine.tokenizer_manager
        return {
            **manager.server_args.resolved_dict(),
            "internal_states": await manager.get_internal_state(),
        }

    async def start_profile(self, folder: str) -> None:
        """Have every rank record a torch trace from now on."""
        from sglang.srt.managers.io_struct import ProfileReq

        await self._engine.tokenizer_manager.start_profile(
            ProfileReq(
                output_dir=folder,
                activities=["CPU", "GPU"],
                with_stack=False,
                record_shapes=False,
            )
        )

    async def stop_profile(self) -> None:
        """End the trace; each rank writes a `*.trace.json.gz` into the folder."""
        await self._engine.tokenizer_manager.stop_profile()


@contextmanager
def _variables(values: Mapping[str, str]) -> Iterator[None]:
    """Environment for the processes that are started meanwhile."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
