from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitserve.data.refusal import Reason, RowRefused
from splitserve.data.samples import (
    DropReport,
    Sample,
    has_anchor,
    limit_sample,
    make_sample,
    preview,
    sample_id_of,
)

END = 9


def sample(mask: str, sample_id: str = "p/0") -> Sample:
    return Sample(sample_id, "p", "d", tuple(range(len(mask))), tuple(c == "1" for c in mask))


def test_response_is_supervised_to_its_end_of_turn() -> None:
    made = make_sample(
        sample_id_of("p", 1), "p", "d", [END, 5], [6, 7, END, 8], max_tokens=10,
        end_of_turn_ids={END},
    )  # fmt: skip
    assert made == Sample("p/1", "p", "d", (END, 5, 6, 7, END), (False, False, True, True, True))
    unfinished = make_sample("p/0", "p", "d", [5], [6, 7], max_tokens=10, end_of_turn_ids={END})
    assert unfinished.token_ids == (5, 6, 7)
    assert unfinished.loss_mask == (False, True, True)


@given(
    st.lists(st.integers(0, 8), max_size=8),
    st.lists(st.integers(0, 9), max_size=8),
    st.integers(1, 12),
)
def test_a_sample_is_a_prefix_with_an_anchor_or_refused(
    prompt: list[int], response: list[int], max_tokens: int
) -> None:
    whole = (*prompt, *response)
    try:
        made = make_sample("p/0", "p", "d", prompt, response, max_tokens=max_tokens)
    except RowRefused as refused:
        if not response:
            assert refused.reason is Reason.EMPTY_ANSWER
        elif len(response) == 1:
            assert refused.reason is Reason.NO_ANCHOR
        else:
            assert refused.reason is Reason.PROMPT_TOO_LONG
            assert max_tokens < len(prompt) + 2
        return
    assert made.token_ids == whole[:max_tokens]
    assert made.loss_mask == tuple(i >= len(prompt) for i in range(len(made.token_ids)))
    assert made.truncated == (len(whole) > max_tokens)
    assert has_anchor(made.loss_mask)


@pytest.mark.parametrize(
    ("mask", "expected"),
    [("01010", False), ("", False), ("1", False), ("000", False), ("0110", True), ("01011", True)],
)
def test_has_anchor(mask: str, expected: bool) -> None:
    assert has_anchor([c == "1" for c in mask]) is expected


def test_supervised_tokens_without_a_neighbour_are_refused() -> None:
    with pytest.raises(RowRefused, match="2 of 5 tokens") as caught:
        limit_sample(sample("01010"), max_tokens=10)
    assert caught.value.reason is Reason.NO_ANCHOR
    assert caught.value.token_ids == (0, 1, 2, 3, 4)


def test_a_limit_that_holds_exactly_is_no_truncation() -> None:
    assert limit_sample(sample("00111"), max_tokens=5) == sample("00111")
    cut = limit_sample(sample("00111"), max_tokens=4)
    assert (cut.token_ids, cut.truncated) == ((0, 1, 2, 3), True)
    assert limit_sample(cut, max_tokens=4).truncated


def test_preview_marks_what_is_supervised() -> None:
    def decode(ids: object) -> str:
        return "".join(chr(ord("a") + i) for i in ids)  # type: ignore[attr-defined]

    assert preview(range(5), [False, True, True, False, True], decode) == "a[[bc]]d[[e]]"
    assert preview(range(3), [], decode) == "abc"
    assert preview(range(20), [False] * 20, decode, limit=6) == "abc ... rst"


@given(st.lists(st.sampled_from(["", "late", "empty_answer", "nonfinite"]), max_size=40))
def test_totals_add_up(outcomes: list[str]) -> None:
    report = DropReport()
    for i, outcome in enumerate(outcomes):
        if outcome in ("", "late"):
            report.use(sample("011", f"p{i}/0"))
        if outcome == "late":
            report.drop(f"p{i}/0", "nonfinite", "row 3")
        elif outcome:
            report.drop(f"p{i}/0", outcome)
    assert report.num_rows == len(outcomes)
    assert report.num_used == outcomes.count("")
    assert report.num_used + sum(report.reasons.values()) == report.num_rows
    assert report.num_dropped == sum(report.reasons.values())
    assert report.reasons.get("nonfinite", 0) == outcomes.count("late") + outcomes.count(
        "nonfinite"
    )
    whole = json.loads(json.dumps(report.to_dict()))
    assert whole["examples"].keys() == whole["dropped"].keys()


def test_report_counts_truncation_and_keeps_the_first_example() -> None:
    report = DropReport()
    report.use(limit_sample(sample("0111", "a/0"), max_tokens=3))
    report.use(sample("0111", "b/0"))
    report.drop("c/0", RowRefused(Reason.NO_ANCHOR, "first"))
    report.drop("d/0", RowRefused(Reason.NO_ANCHOR, "second"))
    assert report.to_dict() == {
        "rows": 4,
        "used": 2,
        "truncated": 1,
        "dropped": {"no_anchor": 2},
        "examples": {"no_anchor": {"sample_id": "c/0", "detail": "first"}},
    }
    report.drop("a/0", "nonfinite")
    assert (report.num_truncated, report.num_used) == (0, 1)
    for again in (lambda: report.drop("a/0", "nonfinite"), lambda: report.use(sample("11", "a/0"))):
        with pytest.raises(AssertionError):
            again()


def test_limit_on_drops() -> None:
    report = DropReport()
    with pytest.raises(ValueError, match="there are no rows"):
        report.check(max_drop_fraction=0.5)
    report.use(sample("011", "a/0"))
    report.drop("b/0", RowRefused(Reason.EMPTY_ANSWER, "the response has no tokens"))
    report.check(max_drop_fraction=0.5)
    with pytest.raises(
        ValueError, match=r"data\.max_drop_fraction: 1 of 2 .* 0\.4 .*empty_answer 1 .*b/0"
    ):
        report.check(max_drop_fraction=0.4)


def test_nothing_to_train_on_shows_a_preview() -> None:
    report = DropReport()
    with pytest.raises(RowRefused) as caught:
        limit_sample(sample("01010"), max_tokens=9)
    report.drop("p/0", caught.value)
    with pytest.raises(ValueError, match="two supervised tokens next to each other") as failed:
        report.check(max_drop_fraction=1.0, decode=lambda ids: "".join(map(str, ids)))
    assert "0[[1]]2[[3]]4" in str(failed.value)
