"""What a served target's answers are counted and timed as."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from dspark.report import AcceptReport
from serving.measure import Answer, measure, round_counts


@dataclass(frozen=True)
class Prompt:
    domain: str
    token_ids: tuple[int, ...]


class FakeServer:
    """Answers with the counts that a prompt's tokens spell, two milliseconds a token."""

    def __init__(self) -> None:
        self.running = self.most = 0

    async def decode(
        self, token_ids: Sequence[int], temperature: float, max_new_tokens: int
    ) -> Answer:
        self.running += 1
        self.most = max(self.most, self.running)
        await asyncio.sleep(0.001)
        self.running -= 1
        histogram = list(token_ids)
        tokens = 1 + sum((k + 1) * n for k, n in enumerate(histogram))
        meta = {"completion_tokens": tokens}
        if sum(histogram):
            meta |= {
                "spec_verify_ct": sum(histogram),
                "spec_correct_drafts_histogram": histogram,
            }
        return Answer(meta, 0.0, 1.0, 1.0 + 0.002 * (tokens - 1))


def run(server: FakeServer, prompts: list[Prompt], **changes: object) -> AcceptReport:
    values = {
        "block_size": 3,
        "temperature": 0.0,
        "max_new_tokens": 16,
        "concurrency": 2,
        "settings": {"draft_step": 7},
    }
    return asyncio.run(measure(server.decode, prompts, **(values | changes)))


def test_counts_times_and_settings() -> None:
    prompts = [Prompt("a", (2, 0, 1)), Prompt("b", (0, 0, 0, 4)), Prompt("b", (0,))]
    report = run(server := FakeServer(), prompts)
    assert server.most == 2
    assert report.domains["a"].num_tokens == 5 and report.domains["a"].num_rounds == 3
    assert report.domains["b"].to_dict()["accept_length"] == 4.0
    assert report.accept_length == 21 / 7
    assert report.settings["draft_step"] == 7 and report.settings["rule"] == "greedy"
    assert report.timings["mean_tpot_ms"] == pytest.approx(2.0)
    assert report.timings["mean_ttft_ms"] == pytest.approx(1000.0)


def test_a_target_alone_has_times_and_no_rounds() -> None:
    report = run(FakeServer(), [Prompt("a", (0,))], block_size=0)
    assert report.total.num_rounds == 0
    assert report.timings["mean_tpot_ms"] == 0.0


def test_sampling_names_its_rule() -> None:
    report = run(FakeServer(), [Prompt("a", (1,))], temperature=0.7)
    assert report.settings["rule"] == "token-by-token rejection sampling"


def test_counts_of_a_request() -> None:
    meta = {
        "completion_tokens": 10,
        "spec_verify_ct": 4,
        "spec_correct_drafts_histogram": [2, 0, 1, 1],
    }
    assert round_counts(meta) == ([2, 0, 1, 1], 9)
    assert round_counts({"completion_tokens": 1}) == ((), 0)
    with pytest.raises(ValueError, match="5 rounds"):
        round_counts({**meta, "spec_verify_ct": 5})
