"""Rendered rows with their supervised tokens in colour, for the terminal and as an HTML page."""

from __future__ import annotations

import html
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from rich.text import Text

from splitserve.data.length import Document, limit
from splitserve.data.refusal import RowRefused

STYLES = {"supervised": "bold green", "context": "default", "truncated": "strike red"}
_SHADES = {
    "supervised": "background:#c9f2d0",
    "context": "color:#555",
    "truncated": "background:#f6cccc;text-decoration:line-through",
}


@dataclass(frozen=True, slots=True)
class Shown:
    """One row of a preview: what it is, and its text in pieces with their kinds."""

    title: str
    pieces: tuple[tuple[str, str], ...]
    """(text, kind); kinds are the keys of STYLES."""


def show_document(
    document: Document, max_tokens: int, decode: Callable[[Sequence[int]], str]
) -> Shown:
    """A document as it would be cut to `max_tokens`.

    Args:
        document: uncut.
        decode: token ids to text.
    """
    ids, mask = document.token_ids, document.loss_mask
    try:
        kept = limit(document.id, document.domain, ids, mask, max_tokens)
    except RowRefused as refused:
        return show_refusal(document.id, refused, decode)
    size = len(kept.token_ids)
    title = (
        f"{document.id} ({document.domain}): {size} tokens, "
        f"{int(np.count_nonzero(kept.loss_mask))} supervised"
    )
    if kept.truncated:
        title += f", {len(ids) - size} cut off"
    return Shown(title, _pieces(ids.tolist(), mask.tolist(), size, decode))


def show_refusal(name: str, refused: RowRefused, decode: Callable[[Sequence[int]], str]) -> Shown:
    """A row that is dropped, with its reason and what was there."""
    ids = list(refused.token_ids)
    mask = [*refused.loss_mask, *[False] * (len(ids) - len(refused.loss_mask))]
    title = f"{name}: dropped as {refused.reason.value}: {refused.detail}"
    return Shown(title, _pieces(ids, mask, len(ids), decode))


def to_text(shown: Shown) -> Text:
    """For rich's console."""
    text = Text()
    text.append(f"{shown.title}\n", "bold")
    for piece, kind in shown.pieces:
        text.append(piece, STYLES[kind])
    return text


def to_html(rows: Sequence[Shown], heading: str) -> str:
    """A page of its own; newlines at the edges of a piece are drawn, so that they can be seen."""
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8>",
        f"<title>{html.escape(heading)}</title>",
        "<style>body{font:14px sans-serif;margin:2em}pre{white-space:pre-wrap;"
        "border:1px solid #ccc;padding:1em}",
        *(f".{kind}{{{style}}}" for kind, style in _SHADES.items()),
        f"</style><h1>{html.escape(heading)}</h1><p>",
        " ".join(f"<span class={kind}>{kind}</span>" for kind in _SHADES),
        "</p>",
    ]
    for row in rows:
        body = "".join(
            f"<span class={kind}>{html.escape(text).replace(chr(10), '&crarr;' + chr(10))}</span>"
            for text, kind in row.pieces
        )
        parts.append(f"<h2>{html.escape(row.title)}</h2><pre>{body}</pre>")
    return "\n".join(parts) + "\n"


def _pieces(
    ids: Sequence[int], mask: Sequence[bool], size: int, decode: Callable[[Sequence[int]], str]
) -> tuple[tuple[str, str], ...]:
    def kinds() -> Iterator[tuple[str, int]]:
        for place, (token, on) in enumerate(zip(ids, mask, strict=True)):
            kind = "truncated" if place >= size else "supervised" if on else "context"
            yield kind, token

    return tuple(
        (decode([token for _, token in run]), kind)
        for kind, run in itertools.groupby(kinds(), key=lambda pair: pair[0])
    )
