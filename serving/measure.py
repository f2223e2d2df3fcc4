"""Accept length and speed of a served target, from what SGLang says of each request.

Per request, never from the server's running average: that one is cumulative since the start, and
advances only when SGLang writes a log line.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from dspark.report import AcceptReport

T = TypeVar("T")


class ServedPrompt(Protocol):
    """A prompt to be answered."""

    @property
    def domain(self) -> str:
        """Under which it is counted."""

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Rendered."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One answered request."""

    meta: dict[str, Any]
    """SGLang's `meta_info` of the finished request."""
    asked: float
    """When it was handed over, seconds of a monotonic clock."""
    first: float
    """When its first token came."""
    last: float
    """When its last token came."""
    token_ids: tuple[int, ...] = field(default=(), repr=False)
    """The answer, where the server was asked for it."""
    arrivals: tuple[tuple[float, int], ...] = field(default=(), repr=False)
    """When how many tokens had come, seconds and total."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One request."""

    token_ids: tuple[int, ...] = field(repr=False)
    temperature: float = 0.0
    max_new_tokens: int = 256
    ignore_eos: bool = False
    """Go on to `max_new_tokens` whatever is generated."""
    stop_token_ids: tuple[int, ...] = ()

    def sampling(self) -> dict[str, Any]:
        """SGLang's `sampling_params`."""
        return {
            "temperature": self.temperature,
            "max_new_tokens": self.max_new_tokens,
            "ignore_eos": self.ignore_eos,
            "stop_token_ids": list(self.stop_token_ids),
        }


Stream = AsyncIterator[dict[str, Any]]
"""SGLang's parts of an answer as they come."""


async def record_stream(stream: Stream) -> Answer:
    """Read a stream to its end and note when what came.

    Raises:
        ValueError: SGLang gave the request up.
    """
    asked = time.monotonic()
    arrivals: list[tuple[float, int]] = []
    tokens: list[int] = []
    part: dict[str, Any] = {}
    async for part in stream:
        now = time.monotonic()
        count = int(part["meta_info"].get("completion_tokens") or 0)
        if count and (not arrivals or count > arrivals[-1][1]):
            arrivals.append((now, count))
        ids = part.get("output_ids") or []
        # Parts hold everything so far, or only what is new, as the server is set.
        tokens = list(ids) if len(ids) == count else tokens + list(ids)
    meta = part.get("meta_info") or {}
    reason = meta.get("finish_reason") or {}
    if reason.get("type") not in ("stop", "length") or not arrivals:
        raise ValueError(
            f"SGLang gave a request up: {reason or 'the stream ended early'}; allowed: an answer "
            "that ends by itself or at its limit; see the server's log"
        )
    return Answer(meta, asked, arrivals[0][0], arrivals[-1][0], tuple(tokens), tuple(arrivals))


Decode = Callable[[Sequence[int], float, int], Awaitable[Answer]]
"""Answers (token ids, temperature, max_new_tokens)."""


async def measure(
    decode: Decode,
    prompts: Sequence[ServedPrompt],
    *,
    block_size: int,
    temperature: float,
    max_new_tokens: int,
    concurrency: int,
    settings: dict[str, Any],
) -> AcceptReport:
    """Answer every prompt, at most `concurrency` at a time, and count.

    Args:
        block_size: drafts in a round; with 0 the target decodes alone and only times are taken.
        settings: what else the figures depend on, for the report.

    Returns:
        the counts, and as `timings` those of `summarize`.

    Raises:
        ValueError: SGLang's counts of a request contradict each other, or do not fit the block.
    """
    answers, wall = await answer_all(
        lambda prompt: decode(prompt.token_ids, temperature, max_new_tokens), prompts, concurrency
    )
    facts = {
        "temperature": temperature,
        "rule": "greedy" if temperature == 0.0 else "token-by-token rejection sampling",
        "max_new_tokens": max_new_tokens,
        "concurrency": concurrency,
        "decoder": "served",
        **settings,
    }
    return summarize([p.domain for p in prompts], answers, wall, block_size, facts)


async def answer_all(
    answer: Callable[[T], Awaitable[Answer]], items: Sequence[T], concurrency: int
) -> tuple[list[Answer], float]:
    """The answers in the order of the items, and the seconds that all took together."""
    places = asyncio.Semaphore(concurrency)

    async def one(item: T) -> Answer:
        async with places:
            return await answer(item)

    started = time.monotonic()
    tasks = [asyncio.ensure_future(one(item)) for item in items]
    try:
        answers = await asyncio.gather(*tasks)
    finally:
        await end_all(tasks)
    return list(answers), time.monotonic() - started


async def end_all(tasks: Sequence[asyncio.Future[Any]]) -> None:
    """Cancel those that go on, and wait for their end: nobody asks for their results any more."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def summarize(
    domains: Sequence[str],
    answers: Sequence[Answer],
    wall: float,
    block_size: int,
    settings: dict[str, Any],
) -> AcceptReport:
    """Counts and times of answers.

    Returns:
        the counts, and as `timings`: wall_seconds, output_tokens_per_second, mean_ttft_ms,
        mean_tpot_ms and median_tpot_ms (per request: time after the first token by the tokens
        after it).

    Raises:
        ValueError: SGLang's counts of a request contradict each other, or do not fit the block.
    """
    report = AcceptReport(block_size, settings)
    for domain, item in zip(domains, answers, strict=True):
        report.add_served(domain, *round_counts(item.meta))
    tpot = [
        1e3 * (item.last - item.first) / (tokens - 1)
        for item in answers
        if (tokens := item.meta["completion_tokens"]) > 1
    ]
    report.timings = {
        "wall_seconds": wall,
        "output_tokens_per_second": sum(a.meta["completion_tokens"] for a in answers) / wall,
        "mean_ttft_ms": 1e3 * statistics.fmean(a.first - a.asked for a in answers),
        "mean_tpot_ms": statistics.fmean(tpot) if tpot else 0.0,
        "median_tpot_ms": statistics.median(tpot) if tpot else 0.0,
    }
    return report


def round_counts(meta: dict[str, Any]) -> tuple[Sequence[int], int]:
    """From a request's `meta_info`: rounds by accepted drafts, and tokens that rounds committed.

    The first token is the prefill's and belongs to no round.
    Source: SGLang 0.5.23, srt/managers/tokenizer_manager.py.

    Raises:
        ValueError: the number of rounds is not the histogram's sum.
    """
    histogram = meta.get("spec_correct_drafts_histogram") or ()
    if sum(histogram) != (meta.get("spec_verify_ct") or 0):
        raise ValueError(
            f"SGLang reports {meta.get('spec_verify_ct')} rounds and a histogram of {histogram}; "
            "allowed: equal sums; measure with the supported SGLang"
        )
    return histogram, max(0, int(meta["completion_tokens"]) - 1) if histogram else 0
