from __future__ import annotations

from html.parser import HTMLParser

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from splitserve.data.length import Document
from splitserve.data.preview import STYLES, Shown, show_document, show_refusal, to_html, to_text
from splitserve.data.refusal import Reason, RowRefused
from splitserve.data.stats import QUANTILES, DataStats


def document(mask: str, domain: str = "d", start: int = 0) -> Document:
    on = np.array([c == "1" for c in mask])
    return Document("a", domain, np.arange(start, start + len(mask)), on, len(mask), int(on.sum()))


def test_stats_by_hand() -> None:
    stats = DataStats(max_tokens=300, num_anchors=2)
    for one in (
        document("00111"),
        document("00111"),
        document("001111", "e"),
        document("0" + "1" * 199, "e", start=7),
    ):
        stats.add(one)
    figures = stats.to_dict()
    quantiles = figures.pop("length_quantiles")
    assert quantiles == {"0": 5, "0.1": 5, "0.5": 5, "0.9": 200, "0.99": 200, "1": 200}
    assert figures == {
        "documents": 4,
        "tokens": 216,
        "supervised_tokens": 209,
        "supervised_share": 209 / 216,
        "length_buckets": {"128": 3, "256": 1},
        "domains": {
            "d": {"documents": 2, "tokens": 10, "supervised_tokens": 6},
            "e": {"documents": 2, "tokens": 206, "supervised_tokens": 203},
        },
        "duplicate_documents": 1,
        "duplicate_prompts": 2,
        "anchor_places": 2 + 2 + 3 + 198,
        "expected_anchors": 8,
        "expected_anchors_per_document": 2.0,
    }


@given(st.lists(st.integers(2, 50), min_size=1, max_size=40))
def test_quantiles_are_the_sorted_lengths(sizes: list[int]) -> None:
    stats = DataStats(50, 1)
    for size in sizes:
        stats.add(document("1" * size))
    ordered = sorted(sizes)
    expected = {f"{q:g}": ordered[max(0, int(np.ceil(q * len(sizes))) - 1)] for q in QUANTILES}
    assert stats.to_dict()["length_quantiles"] == expected
    assert stats.to_dict()["duplicate_documents"] == len(sizes) - len(set(sizes))


def test_no_documents() -> None:
    figures = DataStats(10, 1).to_dict()
    assert (figures["documents"], figures["supervised_share"]) == (0, 0.0)
    assert figures["duplicate_documents"] == figures["expected_anchors_per_document"] == 0


def decode(ids: object) -> str:
    return "".join(chr(ord("a") + i) for i in ids)  # type: ignore[attr-defined]


def test_pieces_of_a_document_that_is_cut() -> None:
    shown = show_document(document("0110011"), 5, decode)
    assert shown.pieces == (("a", "context"), ("bc", "supervised"), ("defg", "truncated"))
    assert shown.title == "a (d): 3 tokens, 2 supervised, 4 cut off"
    whole = show_document(document("0110011"), 7, decode)
    assert [kind for _, kind in whole.pieces] == ["context", "supervised"] * 2
    assert whole.title == "a (d): 7 tokens, 4 supervised"


def test_refused_rows_say_why_and_show_what_was_there() -> None:
    assert show_document(document("00011"), 4, decode).title.startswith(
        "a: dropped as prompt_too_long: "
    )
    refused = RowRefused(Reason.ANSWER_END_MERGED, "why", token_ids=(0, 1))
    assert show_refusal("a", refused, decode) == Shown(
        "a: dropped as answer_end_merged: why", (("ab", "context"),)
    )


ROWS = [Shown("t <1>", (("x\n<b>&", "context"), ("[red]y", "supervised"), ("z", "truncated")))]


def test_the_terminal_has_the_text_in_colour() -> None:
    text = to_text(ROWS[0])
    assert text.plain == "t <1>\nx\n<b>&[red]yz"
    styles = {text.plain[s.start : s.end]: s.style for s in text.spans}
    assert styles["[red]y"] == STYLES["supervised"]
    assert styles["z"] == STYLES["truncated"]
    console = Console(force_terminal=True, color_system="standard", no_color=False)
    with console.capture() as capture:
        console.print(text)
    assert "\x1b[1;32m[red]y" in capture.get()


class _Spans(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.kind, self.found = "", []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.kind = dict(attrs).get("class") or "" if tag == "span" else ""
        assert tag != "b", "text of a row has become markup"

    def handle_endtag(self, tag: str) -> None:
        self.kind = ""

    def handle_data(self, data: str) -> None:
        if self.kind and data != self.kind:
            self.found.append((data, self.kind))


@pytest.mark.parametrize("heading", ["rows", "<b>rows"])
def test_the_page_has_the_text_in_colour(heading: str) -> None:
    page = _Spans()
    page.feed(to_html(ROWS, heading))
    assert page.found == [
        ("x\u21b5\n<b>&", "context"),
        ("[red]y", "supervised"),
        ("z", "truncated"),
    ]
