"""Splitting prompts into a part to train on and a part to measure on.

The split depends on the prompts' ids and the seed alone: neither the order of the file nor the
process that computes it changes it.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from splitserve.data.conversation import folded, plain_text
from splitserve.data.prompts import Prompt


@dataclass(frozen=True, slots=True)
class Split:
    """Two disjoint parts, each in an order that mixes the domains and follows from the ids."""

    train: tuple[Prompt, ...]
    held_out: tuple[Prompt, ...]


def split_prompts(prompts: Iterable[Prompt], held_out_fraction: float, seed: int) -> Split:
    """Hold out the same share of every domain.

    A domain with two prompts or more gives at least one to either part, one with a single prompt
    gives it to training. A fraction of 0 holds nothing out.

    Raises:
        ValueError: the fraction is not in [0, 1), or the same text would be
            trained on and measured on.
    """
    if not 0.0 <= held_out_fraction < 1.0:
        raise ValueError(
            f"data.held_out_fraction: {held_out_fraction!r} is not in [0, 1); give the share of "
            "prompts to measure on, such as 0.15, or 0 with a file in data.eval_prompts"
        )
    ordered = mixed(prompts, seed)
    by_domain: dict[str, list[Prompt]] = defaultdict(list)
    for prompt in ordered:
        by_domain[prompt.domain].append(prompt)
    held_out_ids = {
        prompt.id
        for group in by_domain.values()
        for prompt in group[: num_held_out(len(group), held_out_fraction)]
    }
    split = Split(
        tuple(prompt for prompt in ordered if prompt.id not in held_out_ids),
        tuple(prompt for prompt in ordered if prompt.id in held_out_ids),
    )
    check_no_leak(split.train, split.held_out)
    return split


def mixed(prompts: Iterable[Prompt], seed: int) -> list[Prompt]:
    """The prompts in an order that mixes domains and follows from the ids."""
    return sorted(prompts, key=lambda prompt: _rank(prompt.id, seed))


def check_no_leak(train: Iterable[Prompt], held_out: Iterable[Prompt]) -> None:
    """Refuse prompts that are trained on and measured on.

    Two prompts are the same when their messages before the answer agree up to case and white
    space.

    Raises:
        ValueError: names both ids of the first such pair, and how many there are.
    """
    trained: dict[tuple[tuple[str, str], ...], str] = {}
    for prompt in train:
        trained.setdefault(_question(prompt), prompt.id)
    pairs = [
        (trained[question], prompt.id)
        for prompt in held_out
        if (question := _question(prompt)) in trained
    ]
    if pairs:
        raise ValueError(
            f"data.prompts: the text of {pairs[0][1]!r}, which is held out, is also that of "
            f"{pairs[0][0]!r}, which is trained on ({len(pairs)} such held-out prompts); accept "
            "lengths would be too good: remove one prompt of each pair"
        )


def num_held_out(size: int, fraction: float) -> int:
    """How many of a domain's prompts are held out: of two or more at least one, never all."""
    if fraction == 0.0 or size < 2:
        return 0
    return min(max(round(size * fraction), 1), size - 1)


def _rank(prompt_id: str, seed: int) -> bytes:
    key = f"split/{seed}/{prompt_id}".encode()
    return hashlib.blake2b(key, digest_size=16).digest()


def _question(prompt: Prompt) -> tuple[tuple[str, str], ...]:
    messages = prompt.messages
    if messages[-1]["role"] == "assistant":
        messages = messages[:-1]
    return tuple((m["role"], folded(plain_text(m))) for m in messages)
