"""Conversations that drafts are measured with, chosen from those that are trained on."""

from __future__ import annotations

import hashlib
import heapq
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import replace

from splitserve.data.conversation import Conversation, TokenRow, parse_row
from splitserve.data.length import supervised_spans
from splitserve.data.prompts import Prompt
from splitserve.data.refusal import RowRefused
from splitserve.data.sources import RawRow, parse_json
from splitserve.data.split import num_held_out
from splitserve.errors import UserError

MOST_HELD_OUT = 1024
"""Conversations held out of a source, however large it is."""
MOST_DOMAINS = 256


def question_of(row: Conversation | TokenRow, num_ids: int) -> Prompt | None:
    """A row without its last answer; None where that leaves no question.

    Args:
        num_ids: of the tokenizer; a row with other ids is no question.
    """
    if isinstance(row, TokenRow):
        if row.token_ids.min() < 0 or row.token_ids.max() >= num_ids:
            return None
        spans = supervised_spans(row.loss_mask)
        begin = int(spans[-1, 0]) if len(spans) else 0
        ids = tuple(row.token_ids[:begin].tolist())
        return Prompt(row.id, row.domain, (), token_ids=ids, held_out=True) if ids else None
    answers = [i for i, m in enumerate(row.messages) if m["role"] == "assistant"]
    if not answers or not answers[-1] or row.messages[answers[-1] - 1]["role"] == "assistant":
        return None
    messages = row.messages[: answers[-1]]
    return Prompt(row.id, row.domain, messages, row.tools, held_out=True)


def choose_held_out(
    rows: Iterable[tuple[RawRow, str]],
    fraction: float,
    seed: int,
    num_ids: int,
    most: int = MOST_HELD_OUT,
) -> dict[int, Prompt]:
    """The questions of the rows that are held out, by the rows' numbers from 0.

    Every domain gives the same share of its rows, `most` at most of all together, but one at least
    where it has two. Which ones follows from ids, places and the seed. Rows without a question
    or an answer are not chosen; they are the business of whoever trains on them.

    Args:
        rows: with their default domains.
        fraction: share of the rows, 0 to below 1.
        num_ids: of the tokenizer.

    Raises:
        UserError: rows of more than MOST_DOMAINS domains.
    """
    sizes: Counter[str] = Counter()
    lowest: dict[str, list[tuple[int, int, Prompt]]] = defaultdict(list)
    """Of each domain, the rows of the lowest ranks, the highest of them first."""
    for number, (raw, default_domain) in enumerate(rows):
        try:
            row = parse_row(parse_json(raw), raw.place, default_domain)
        except RowRefused:
            continue
        question = question_of(row, num_ids)
        if question is None:
            continue
        sizes[row.domain] += 1
        if len(sizes) > MOST_DOMAINS:
            raise UserError(
                "data.conversations",
                raw.place,
                f"rows of at most {MOST_DOMAINS} domains",
                "name fewer domains, or give data.eval_prompts",
            )
        # A source may use an id twice.
        named = replace(question, id=f"{row.id}/q{number}")
        item = (-_rank(number, row.id, seed), number, named)
        held = lowest[row.domain]
        if len(held) < most:
            heapq.heappush(held, item)
        elif item[:2] > held[0][:2]:
            heapq.heapreplace(held, item)
    wanted = {domain: num_held_out(size, fraction) for domain, size in sizes.items()}
    scale = min(1.0, most / max(1, sum(wanted.values())))
    chosen: dict[int, Prompt] = {}
    for domain, number in sorted(wanted.items()):
        count = max(1, int(number * scale)) if number else 0
        best = sorted(lowest[domain], key=lambda item: item[:2], reverse=True)[:count]
        chosen |= {place: question for _, place, question in best}
    return chosen


def _rank(number: int, name: str, seed: int) -> int:
    key = f"held out/{seed}/{number}/{name}".encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little")
