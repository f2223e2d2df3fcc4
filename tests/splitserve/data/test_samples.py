from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitserve.data.account import DropReport, preview
from splitserve.data.length import Document, limit, num_anchor_places
from splitserve.data.refusal import Reason, RowRefused
from splitserve.data.samples import (
    Sample,
    in_share,
    make_sample,
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
    assert num_anchor_places(np.array(made.loss_mask)) > 0


def limited(mask: str, name: str = "p", max_tokens: int = 10) -> Document:
    on = np.array([c == "1" for c in mask])
    return limit(name, "d", np.arange(len(mask)), on, max_tokens)


@pytest.mark.parametrize("mask", ["01010", "0", "1", "000"])
def test_supervised_tokens_without_a_neighbour_are_refused(mask: str) -> None:
    with pytest.raises(RowRefused, match=f"{mask.count('1')} of {len(mask)} tokens") as caught:
        limited(mask)
    assert caught.value.reason is Reason.NO_ANCHOR
    assert caught.value.token_ids == tuple(range(len(mask)))


def test_a_limit_that_holds_exactly_is_no_truncation() -> None:
    whole = make_sample("p/0", "p", "d", [0, 1], [2, 3, 4], max_tokens=5)
    assert (whole.token_ids, whole.truncated) == ((0, 1, 2, 3, 4), False)
    cut = make_sample("p/0", "p", "d", [0, 1], [2, 3, 4], max_tokens=4)
    assert (cut.token_ids, cut.truncated) == ((0, 1, 2, 3), True)


def test_preview_marks_what_is_supervised() -> None:
    def decode(ids: object) -> str:
        return "".join(chr(ord("a") + i) for i in ids)  # type: ignore[attr-defined]

    assert preview(range(5), [False, True, True, False, True], decode) == "a[[bc]]d[[e]]"
    assert preview(range(3), [], decode) == "abc"
    assert preview(range(20), [False] * 20, decode, limit=6) == "abc ... rst"


@given(st.lists(st.sampled_from(["", "cut", "empty_answer", "nonfinite"]), max_size=40), st.data())
def test_totals_add_up_in_any_number_of_parts(outcomes: list[str], data: st.DataObject) -> None:
    whole, parts = DropReport(), [DropReport() for _ in range(3)]
    for i, outcome in enumerate(outcomes):
        for report in (whole, parts[data.draw(st.integers(0, 2))]):
            if outcome in ("", "cut"):
                report.use(limited("0111", f"p{i}/0", max_tokens=3 + (not outcome)))
            else:
                report.drop(f"p{i}/0", outcome)
    assert whole.num_rows == len(outcomes)
    assert whole.num_used == sum(o in ("", "cut") for o in outcomes)
    assert whole.num_truncated == outcomes.count("cut")
    assert whole.num_used + sum(whole.reasons.values()) == whole.num_rows
    assert whole.num_zero_mask == outcomes.count("empty_answer")
    assert whole.num_supervised == 2 * outcomes.count("cut") + 3 * outcomes.count("")
    written = json.loads(json.dumps(whole.to_dict()))
    assert written["examples"].keys() == written["dropped"].keys()
    assert DropReport.from_dict(written).to_dict() == written
    joined = DropReport()
    for part in parts:
        joined.add(part)
    del written["examples"]
    assert written.items() <= joined.to_dict().items()


def test_report_counts_cuts_and_keeps_the_first_example() -> None:
    report = DropReport()
    report.use(limit("a", "d", np.arange(6), np.array([0, 1, 1, 0, 1, 1], dtype=bool), 5))
    report.drop("c/0", RowRefused(Reason.NO_ANCHOR, "first"))
    report.drop("d/0", RowRefused(Reason.NO_ANCHOR, "second"))
    assert report.to_dict() == {
        "rows": 3,
        "used": 1,
        "truncated": 1,
        "tokens": 3,
        "supervised_tokens": 2,
        "supervised_tokens_before_cuts": 4,
        "dropped": {"no_anchor": 2},
        "examples": {"no_anchor": {"sample_id": "c/0", "detail": "first"}},
    }
    assert report.supervised_kept == 0.5
    assert DropReport().supervised_kept == 1.0


@pytest.mark.parametrize("change", [{"rows": 5}, {"used": "x"}, {"examples": {}}, {"dropped": 3}])
def test_an_account_that_does_not_add_up_is_refused(change: dict[str, object]) -> None:
    report = DropReport()
    report.drop("a/0", "nonfinite")
    with pytest.raises((KeyError, TypeError, ValueError, AttributeError)):
        DropReport.from_dict({**report.to_dict(), **change})


def test_limit_on_rows_without_a_mask() -> None:
    report = DropReport()
    report.use(sample("011", "a/0"))
    for i in range(3):
        report.drop(f"b{i}/0", RowRefused(Reason.NO_ANSWER, "no message is the assistant's"))
    report.check(max_drop_fraction=1.0, max_zero_mask_fraction=0.75)
    with pytest.raises(
        ValueError, match=r"data\.max_zero_mask_fraction: 3 of 4 .*0\.5 .*no_answer 3 .*b0/0"
    ):
        report.check(max_drop_fraction=1.0, max_zero_mask_fraction=0.5)


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
        limited("01010")
    report.drop("p/0", caught.value)
    with pytest.raises(ValueError, match="two supervised tokens next to each other") as failed:
        report.check(max_drop_fraction=1.0, decode=lambda ids: "".join(map(str, ids)))
    assert "0[[1]]2[[3]]4" in str(failed.value)


def test_a_share_of_the_prompts_is_the_same_each_time() -> None:
    names = [f"p{i}" for i in range(2000)]
    chosen = [n for n in names if in_share(n, 1, 0.25, seed=3)]
    assert 0.2 < len(chosen) / len(names) < 0.3
    assert chosen == [n for n in names if in_share(n, 1, 0.25, seed=3)]
    assert chosen != [n for n in names if in_share(n, 2, 0.25, seed=3)]
    # A larger share takes in the smaller one.
    assert set(chosen) < {n for n in names if in_share(n, 1, 0.5, seed=3)}
    assert all(in_share(n, 0, 1.0, seed=3) for n in names)
