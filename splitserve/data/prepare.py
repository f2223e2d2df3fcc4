"""Conversations that already have answers, made ready for a run.

They are rendered, masked, cut and accounted for into a store, once for all runs on the same data;
another run finds it there. Some of them are held out to measure drafts with, their last answers
left off, and whatever holds one of these questions is not trained on. Two passes over the rows, a
few batches of them in memory.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from splitserve.data.account import DropReport
from splitserve.data.held_out import MOST_HELD_OUT, choose_held_out
from splitserve.data.leak import LeakIndex
from splitserve.data.length import Document
from splitserve.data.pipeline import Pipeline, PipelineSettings
from splitserve.data.prompts import Prompt
from splitserve.data.refusal import RowRefused
from splitserve.data.render import ChatRenderer
from splitserve.data.sources import RawRow, SourceSettings, mix
from splitserve.data.store import DocumentStore, open_or_build, store_key

TOLD_SECONDS = 5.0


@dataclass(frozen=True)
class Preparation:
    """What is made of which rows."""

    sources: tuple[SourceSettings, ...]
    settings: PipelineSettings
    until: str = "all"
    """all or first, see `mix`."""
    held_out_fraction: float = 0.0
    """Of the rows, measured with and not trained on; 0 where others are measured with."""
    seed: int = 0
    """Of that choice."""


@dataclass(frozen=True)
class Prepared:
    """Documents to train on, and questions to measure with."""

    store: DocumentStore
    held_out: tuple[Prompt, ...]


def prepare(
    wanted: Preparation,
    tokenizer: Any,
    end_of_turn_ids: Sequence[int],
    measured: Sequence[Prompt],
    cache_dir: Path,
    tell: Callable[[str], None],
) -> Prepared:
    """Find or make the documents of some sources.

    Args:
        end_of_turn_ids: tokens that end the target's turns.
        measured: further prompts that drafts are measured with, looked for in the rows.
        tell: given a line of progress now and then.

    Raises:
        UserError: a source or the cache cannot be read or written.
        ValueError: the tokenizer has no usable template, or a limit on dropped rows is passed.
    """
    fraction = wanted.held_out_fraction
    held_out: dict[str, Any] = {}
    pipeline = Pipeline(tokenizer, wanted.settings, end_of_turn_ids)

    def build() -> tuple[Iterable[Document], DropReport]:
        nonlocal pipeline
        tell("conversations: reading them, to render and to mask them")
        chosen: dict[int, Prompt] = {}
        if fraction:
            chosen = choose_held_out(_rows(wanted), fraction, wanted.seed, len(tokenizer))
        held_out["prompts"] = [asdict(prompt) for prompt in chosen.values()]
        leaks = leak_index([*measured, *chosen.values()], pipeline.renderer)
        pipeline = Pipeline(tokenizer, wanted.settings, end_of_turn_ids, leaks)
        rows = (row for number, row in enumerate(_rows(wanted)) if number not in chosen)
        return _told(pipeline.documents(rows), pipeline.report, tell), pipeline.report

    key = store_key(
        wanted.sources,
        wanted.settings,
        tokenizer,
        until=wanted.until,
        end_of_turn_ids=end_of_turn_ids,
        more=[fraction, wanted.seed, MOST_HELD_OUT, _digest(measured)],
    )
    store, found = open_or_build(cache_dir, key, build, held_out)
    report = store.report
    tell(
        f"conversations: {len(store)} of {report.num_rows} to train on, {report.num_truncated} cut "
        f"to data.max_tokens={wanted.settings.max_tokens}, {report.num_dropped} dropped, "
        f"{report.supervised_kept:.1%} of the supervised tokens kept, "
        f"{len(store.notes['prompts'])} more held out; "
        f"{'found' if found else 'now kept'} in {store.folder}"
    )
    pipeline.check(store.report if found else pipeline.report, "data.conversations")
    return Prepared(store, tuple(_prompt(values) for values in store.notes["prompts"]))


def leak_index(prompts: Sequence[Prompt], renderer: ChatRenderer) -> LeakIndex | None:
    """What prompts say, to be looked for in rows; None where there are none."""
    if not prompts:
        return None
    return LeakIndex(
        ((p.id, p.messages) for p in prompts if p.messages),
        (
            (p.id, ids, renderer.decode(ids) if p.token_ids else "")
            for p in prompts
            if (ids := p.token_ids or _question_ids(p, renderer))
        ),
    )


def _question_ids(prompt: Prompt, renderer: ChatRenderer) -> tuple[int, ...]:
    """A prompt's messages as they are rendered, without an answer at their end."""
    answered = prompt.messages[-1]["role"] == "assistant"
    messages = prompt.messages[:-1] if answered else prompt.messages
    try:
        return renderer.prompt_ids(messages, prompt.tools) if messages else ()
    except RowRefused:
        # Measuring drops it, with the reason.
        return ()


def _rows(wanted: Preparation) -> Iterator[tuple[RawRow, str]]:
    return mix(wanted.sources, until=wanted.until)


def _told(
    documents: Iterable[Document], report: DropReport, tell: Callable[[str], None]
) -> Iterator[Document]:
    began = told = time.monotonic()
    for document in documents:
        yield document
        now = time.monotonic()
        if now - told >= TOLD_SECONDS:
            told = now
            tell(
                f"conversations: {report.num_rows} rows, {report.num_rows / (now - began):.0f} a "
                f"second, {report.num_dropped} dropped"
            )


def _prompt(values: dict[str, Any]) -> Prompt:
    return Prompt(
        values["id"],
        values["domain"],
        tuple(values["messages"]),
        tuple(values["tools"]),
        tuple(values["token_ids"]),
        held_out=True,
    )


def _digest(prompts: Sequence[Prompt]) -> str:
    text = json.dumps([asdict(prompt) for prompt in prompts], sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
