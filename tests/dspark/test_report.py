"""Accept reports on rounds made by hand."""

from __future__ import annotations

import json

import pytest

from dspark.report import AcceptReport, DomainCounts, Round


def report() -> AcceptReport:
    """Two requests of "code", one of them cut after its second draft, and two of "chat"."""
    made = AcceptReport(3, {"temperature": 0.0, "rule": "greedy"}, timings={"draft_seconds": 1.5})
    made.add("code", [Round(3, 4), Round(0, 1), Round(1, 2)])
    made.add("code", [Round(2, 3), Round(2, 2)])
    made.add("chat", [Round(0, 1)])
    made.add("chat", [])
    return made


def test_figures_of_a_domain() -> None:
    code = report().to_dict()["domains"]["code"]
    assert (code["num_requests"], code["num_rounds"], code["num_tokens"]) == (2, 5, 12)
    assert code["accept_length"] == 12 / 5
    assert code["histogram"] == [1, 1, 2, 1]
    # The cut round accepted two drafts and ended there: position 3 was not reached in it.
    assert code["reached"] == [5, 4, 2]
    assert code["accepted"] == [4, 3, 1]
    assert code["alpha"] == [4 / 5, 3 / 4, 1 / 2]


def test_sglang_counts_the_first_token_of_requests_that_had_a_round() -> None:
    domains = report().to_dict()["domains"]
    assert domains["code"]["sglang_accept_length"] == (12 + 2) / 5
    assert domains["chat"]["sglang_accept_length"] == (1 + 1) / 1
    assert domains["all"]["sglang_accept_length"] == (13 + 3) / 6


def test_all_is_the_sum_over_domains() -> None:
    everything = report().to_dict()["domains"]["all"]
    assert everything["accept_length"] == report().accept_length == 13 / 6
    assert everything["histogram"] == [2, 1, 2, 1]
    assert everything["reached"] == [6, 4, 2]
    assert everything["num_requests"] == 4


def test_a_domain_without_rounds_has_no_alpha() -> None:
    empty = DomainCounts(2).to_dict()
    assert empty["accept_length"] == 1.0
    assert empty["alpha"] == [None, None]
    assert empty["sglang_accept_length"] is None


def test_accept_length_is_one_plus_accepted_drafts_where_nothing_is_cut() -> None:
    counts = DomainCounts(4)
    rounds = [Round(k, k + 1) for k in (0, 4, 2, 2, 1)]
    counts.add(rounds)
    mean = sum(r.num_accepted_drafts for r in rounds) / 5
    assert counts.to_dict()["accept_length"] == 1 + mean
    # Then alpha also follows from the histogram's tails, as it does for SGLang's.
    tails = [sum(counts.histogram[k:]) for k in range(5)]
    assert counts.to_dict()["alpha"] == [tails[k + 1] / tails[k] for k in range(4)]


def test_dict_survives_json_and_back() -> None:
    values = json.loads(json.dumps(report().to_dict()))
    again = AcceptReport.from_dict(values)
    assert again == report()
    assert again.to_dict() == report().to_dict()


def test_merge_adds_counts_and_times() -> None:
    left, right = (AcceptReport(3, report().settings, timings={"draft_seconds": 0.5}) for _ in "ab")
    left.add("code", [Round(3, 4), Round(0, 1), Round(1, 2)])
    left.add("chat", [Round(0, 1)])
    right.add("code", [Round(2, 3), Round(2, 2)])
    right.add("chat", [])
    left.merge(right)
    assert left.domains == report().domains
    assert left.timings == {"draft_seconds": 1.0}


@pytest.mark.parametrize(
    "other", [AcceptReport(2, report().settings), AcceptReport(3, {"temperature": 1.0})]
)
def test_unlike_reports_are_not_merged(other: AcceptReport) -> None:
    with pytest.raises(ValueError, match="cannot be merged"):
        report().merge(other)


def test_a_domain_named_as_the_sums_is_refused() -> None:
    with pytest.raises(ValueError, match="domain='all'"):
        report().add("all", [Round(0, 1)])


def test_rows_hold_text_for_a_table() -> None:
    assert report().rows() == [
        ["domain", "accept length", "alpha_1", "alpha_2", "alpha_3", "tokens"],
        ["chat", "1.00", "0.00", "-", "-", "1"],
        ["code", "2.40", "0.80", "0.75", "0.50", "12"],
        ["all", "2.17", "0.67", "0.75", "0.50", "13"],
    ]


def test_a_server_s_counts_give_the_same_figures_where_no_round_was_cut() -> None:
    rounds = [Round(0, 1), Round(2, 3), Round(3, 4), Round(0, 1)]
    by_round, served = AcceptReport(3, {}), AcceptReport(3, {})
    by_round.add("a", rounds)
    served.add_served("a", [2, 0, 1, 1], 9)
    assert served.to_dict() == by_round.to_dict()


def test_a_server_s_cut_round_counts_the_tokens_that_stand() -> None:
    report = AcceptReport(3, {})
    report.add_served("a", [0, 0, 0, 2], 5)
    assert report.accept_length == 2.5


def test_a_server_with_another_block_size_is_refused() -> None:
    with pytest.raises(ValueError, match="3 accepted drafts"):
        AcceptReport(2, {}).add_served("a", [0, 0, 0, 1], 4)
