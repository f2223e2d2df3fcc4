"""From rows to documents: parse, render, mask, cut, and account for every one.

Work is done in batches, by this process or by several; the order of the documents and the account
are the same either way. Each process holds a few batches and no more.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from splitserve.data.account import DropReport
from splitserve.data.conversation import Conversation, TokenRow, parse_row
from splitserve.data.leak import LeakIndex
from splitserve.data.length import Document, limit
from splitserve.data.refusal import Reason, RowRefused
from splitserve.data.render import ChatRenderer
from splitserve.data.sources import RawRow, parse_json
from splitserve.errors import RunFailed, UserError

BATCH_ROWS = 256
_BATCHES_AHEAD = 4
"""Batches in the hands of each worker process."""


@dataclass(frozen=True)
class PipelineSettings:
    """How rows become documents."""

    max_tokens: int = 2048
    """Longest document, prompt and answers together."""
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Arguments of the chat template, such as enable_thinking."""
    system_prompt: str | None = None
    """Put before conversations that have none; None leaves it to the template."""
    last_answer_only: bool = False
    """Supervise only the last answer of a conversation."""
    max_drop_fraction: float = 0.5
    """A larger share of dropped rows stops the run before training."""
    max_zero_mask_fraction: float = 0.05
    """So does a larger share of rows without a supervised token."""
    num_workers: int = 0
    """Processes that work on rows; 0 does it in this one."""

    def __post_init__(self) -> None:
        for name, minimum in (("max_tokens", 2), ("num_workers", 0)):
            value = getattr(self, name)
            if value < minimum:
                raise UserError(f"data.{name}", value, f"{minimum} or more", f"raise data.{name}")
        for name in ("max_drop_fraction", "max_zero_mask_fraction"):
            value = getattr(self, name)
            if not 0.0 <= value <= 1.0:
                raise UserError(f"data.{name}", value, "0 to 1", f"set data.{name} to a fraction")


class Pipeline:
    """Turns rows into documents with one tokenizer.

    Args:
        tokenizer: the target's, a fast one.
        settings: see there.
        end_of_turn_ids: tokens that end the target's turns.
        leaks: eval prompts that no row may hold; None looks for none.
    """

    def __init__(
        self,
        tokenizer: Any,
        settings: PipelineSettings,
        end_of_turn_ids: Sequence[int] = (),
        leaks: LeakIndex | None = None,
    ) -> None:
        self.settings = settings
        self.report = DropReport()
        """The account of all rows so far."""
        self.tokenizer = tokenizer
        self.end_of_turn_ids = tuple(end_of_turn_ids)
        self._leaks = leaks
        self._worker = _Worker(tokenizer, settings, self.end_of_turn_ids, leaks)

    def documents(self, rows: Iterable[tuple[RawRow, str]]) -> Iterator[Document]:
        """The documents of rows, each given with its default domain, in the rows' order.

        `report` counts a batch of rows once its documents have been handed out.
        """
        for documents, report in self._batches(_batched(rows, BATCH_ROWS)):
            yield from documents
            self.report.add(report)

    def one(self, row: RawRow, domain: str) -> Document | RowRefused:
        """What becomes of a single row; the account does not see it."""
        (outcome,) = self._worker.outcomes([(row, domain)])
        return outcome[1]

    def check(self, report: DropReport | None = None, field: str = "data") -> None:
        """Stop before training where the account passes a limit.

        Args:
            report: the account of rows that were kept from an earlier time; None takes `report`.
            field: the setting that names the rows.

        Raises:
            ValueError: see `DropReport.check`.
        """
        (report or self.report).check(
            max_drop_fraction=self.settings.max_drop_fraction,
            max_zero_mask_fraction=self.settings.max_zero_mask_fraction,
            decode=self.decode,
            field=field,
        )

    @property
    def renderer(self) -> ChatRenderer:
        """What renders the rows."""
        return self._worker.renderer

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of some tokens, special ones included."""
        return self._worker.renderer.decode(token_ids)

    def _batches(
        self, batches: Iterator[tuple[tuple[RawRow, str], ...]]
    ) -> Iterator[tuple[list[Document], DropReport]]:
        if not self.settings.num_workers:
            yield from map(self._worker.work, batches)
            return
        given = (self.tokenizer, self.settings, self.end_of_turn_ids, self._leaks)
        pool = ProcessPoolExecutor(
            self.settings.num_workers, multiprocessing.get_context("spawn"), _start_worker, given
        )
        waiting: deque[Any] = deque()
        ahead = _BATCHES_AHEAD * self.settings.num_workers
        try:
            for batch in batches:
                waiting.append(pool.submit(_work, batch))
                if len(waiting) >= ahead:
                    yield _unpacked(*waiting.popleft().result())
            while waiting:
                yield _unpacked(*waiting.popleft().result())
        except BrokenProcessPool as error:
            raise RunFailed(
                "a process that tokenizes has died, most often for want of memory; lower "
                "data.num_workers and start again"
            ) from error
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


class _Worker:
    """What one process does with a batch of rows."""

    def __init__(
        self,
        tokenizer: Any,
        settings: PipelineSettings,
        end_of_turn_ids: tuple[int, ...],
        leaks: LeakIndex | None,
    ) -> None:
        self.renderer = ChatRenderer(
            tokenizer,
            settings.chat_template_kwargs,
            settings.system_prompt,
            end_of_turn_ids,
            settings.last_answer_only,
        )
        self._max_tokens = settings.max_tokens
        self._num_ids = len(tokenizer)
        self._leaks = leaks

    def work(self, rows: Sequence[tuple[RawRow, str]]) -> tuple[list[Document], DropReport]:
        """Documents and account of a batch; a row is in one or the other, never in both."""
        report, documents = DropReport(), []
        for name, outcome in self.outcomes(rows):
            if isinstance(outcome, RowRefused):
                report.drop(name, outcome)
            else:
                report.use(outcome)
                documents.append(outcome)
        return documents, report

    def outcomes(
        self, rows: Sequence[tuple[RawRow, str]]
    ) -> Iterator[tuple[str, Document | RowRefused]]:
        """Each row's id with its document, or with why there is none."""
        parsed: list[Conversation | TokenRow | RowRefused] = []
        names: list[str] = []
        for raw, domain in rows:
            names.append(raw.place)
            try:
                made = parse_row(parse_json(raw), raw.place, domain)
                names[-1] = made.id
                if isinstance(made, TokenRow):
                    self._check_ids(made)
                if self._leaks is not None:
                    self._check_leaks(self._leaks, made)
                parsed.append(made)
            except RowRefused as refused:
                parsed.append(refused)
        rendered = iter(
            self.renderer.render_batch(
                [(row.messages, row.tools) for row in parsed if isinstance(row, Conversation)]
            )
        )
        for name, row in zip(names, parsed, strict=True):
            try:
                if isinstance(row, RowRefused):
                    raise row
                if isinstance(row, Conversation):
                    tokens = next(rendered).unwrap()
                    ids, mask = tokens.token_ids, tokens.loss_mask
                    if self._leaks is not None:
                        self._leaks.check_rendered(ids, self.renderer.decode)
                else:
                    ids, mask = row.token_ids, row.loss_mask
                yield name, limit(name, row.domain, ids, mask, self._max_tokens)
            except RowRefused as refused:
                yield name, refused

    def _check_leaks(self, leaks: LeakIndex, row: Conversation | TokenRow) -> None:
        if isinstance(row, TokenRow):
            leaks.check_tokens(row, self.renderer.decode)
        else:
            leaks.check(row)

    def _check_ids(self, row: TokenRow) -> None:
        low, high = int(row.token_ids.min()), int(row.token_ids.max())
        if low < 0 or high >= self._num_ids:
            raise RowRefused(
                Reason.BAD_TOKENS,
                f"input_ids go from {low} to {high}, the tokenizer's from 0 to {self._num_ids - 1}",
            )


_worker: _Worker | None = None


def _start_worker(
    tokenizer: Any,
    settings: PipelineSettings,
    end_of_turn_ids: tuple[int, ...],
    leaks: LeakIndex | None,
) -> None:
    global _worker
    # A worker has one core: the tokenizer's own threads would fight over the others'.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _worker = _Worker(tokenizer, settings, end_of_turn_ids, leaks)


def _work(batch: Sequence[tuple[RawRow, str]]) -> tuple[Any, DropReport]:
    """A batch in a worker process; many small arrays would be slow to send, so few large ones."""
    assert _worker is not None, "the worker process was not set up"
    documents, report = _worker.work(batch)
    head = [
        (d.id, d.domain, len(d.token_ids), d.num_whole, d.num_whole_supervised) for d in documents
    ]
    ids = [d.token_ids for d in documents] or [np.zeros(0, np.int64)]
    masks = [d.loss_mask for d in documents] or [np.zeros(0, bool)]
    packed = (head, np.concatenate(ids).astype(np.int32), np.packbits(np.concatenate(masks)))
    return packed, report


def _unpacked(packed: Any, report: DropReport) -> tuple[list[Document], DropReport]:
    head, ids, bits = packed
    mask = np.unpackbits(bits, count=len(ids)).astype(bool)
    ids = ids.astype(np.int64)
    stops = list(itertools.accumulate(size for _, _, size, _, _ in head))
    documents = [
        Document(name, domain, ids[stop - size : stop], mask[stop - size : stop], whole, supervised)
        for (name, domain, size, whole, supervised), stop in zip(head, stops, strict=True)
    ]
    return documents, report


def _batched(rows: Iterable[Any], size: int) -> Iterator[tuple[Any, ...]]:
    stream = iter(rows)
    while batch := tuple(itertools.islice(stream, size)):
        yield batch
