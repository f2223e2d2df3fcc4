"""Each gate fails for its own reason and for no other."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from fake_server import FakeServer

from serving.gates import (
    GREEDY_TOKENS,
    SAMPLED_TEMPERATURE,
    STATE_PROMPTS,
    Evidence,
    gates_to_dict,
    gather,
    is_right,
    judge,
    score_allowance,
)
from serving.measure import Ask
from serving.workload import Prompt

PROMPTS = (Prompt("a", (1, 2)), Prompt("gsm8k", (3, 4), "so <<1+1=2>>\n#### 7"))
GOOD = Evidence(((1, 2), (3, 4)), ((1, 2), (3, 4)), 2.5, 80, 100)


def failing(second: Evidence, *, declared: bool = False) -> list[str]:
    return [g.name for g in judge(GOOD, second, declared_rounding=declared) if not g.passed]


def test_equal_evidence_passes_everything() -> None:
    gates = judge(GOOD, GOOD)
    assert [g.name for g in gates] == ["bytes", "accept", "state of A", "state of B", "score"]
    assert gates_to_dict(gates)["passed"] is True


def test_one_other_token_fails_the_bytes_and_says_where() -> None:
    changed = replace(GOOD, greedy=((1, 2), (3, 9)), greedy_again=((1, 2), (3, 9)))
    assert failing(changed) == ["bytes"]
    gates = judge(GOOD, changed)
    assert "1 of 2 greedy answers differ, the first from token 1 on" in gates[0].evidence
    assert gates_to_dict(gates)["passed"] is False


def test_a_declared_rounding_is_judged_by_its_score() -> None:
    changed = replace(GOOD, greedy=((1, 2), (3, 9)), greedy_again=((1, 2), (3, 9)))
    assert gates_to_dict(judge(GOOD, changed, declared_rounding=True))["passed"] is True
    worse = replace(changed, num_right=71)
    assert gates_to_dict(judge(GOOD, worse, declared_rounding=True))["passed"] is False
    # Undeclared, the score does not bind.
    assert gates_to_dict(judge(GOOD, replace(GOOD, num_right=0)))["passed"] is True
    unscored = replace(changed, num_right=None)
    assert gates_to_dict(judge(GOOD, unscored, declared_rounding=True))["passed"] is False


def test_accept_length_within_the_tolerance() -> None:
    assert failing(replace(GOOD, accept_length=2.54)) == []
    assert failing(replace(GOOD, accept_length=2.44)) == ["accept"]
    names = [g.name for g in judge(GOOD, replace(GOOD, accept_length=None))]
    assert "accept" not in names


def test_answers_that_change_after_sampling_are_found_on_either_side() -> None:
    assert failing(replace(GOOD, greedy_again=((1, 2), (3, 5)))) == ["state of B"]
    gates = judge(replace(GOOD, greedy_again=((1,), (3, 4))), GOOD)
    assert [g.name for g in gates if not g.passed] == ["state of A"]


def test_chance_of_a_score() -> None:
    assert score_allowance(80, 100) == 8
    assert score_allowance(100, 100) == 0
    assert score_allowance(0, 0) == 0


def test_what_a_server_is_asked() -> None:
    server = FakeServer()

    def text(ids: object) -> str:
        return "it is 7"

    found = asyncio.run(gather(server, PROMPTS, decode_text=text, concurrency=4))
    kinds = [(a.temperature, a.max_new_tokens) for a in server.calls]
    greedy, sampled = (0.0, GREEDY_TOKENS), (SAMPLED_TEMPERATURE, GREEDY_TOKENS)
    assert kinds == [greedy] * 2 + [sampled] * 2 + [greedy] * 2 + [(0.0, 512)]
    assert found.greedy == found.greedy_again
    assert found.accept_length == 2.0
    assert (found.num_right, found.num_problems) == (1, 1)
    # Greedy answers that are long enough are solutions.
    server.calls.clear()
    found = asyncio.run(gather(server, PROMPTS, decode_text=text, answer_tokens=GREEDY_TOKENS))
    assert len(server.calls) == 6
    assert (found.num_right, found.num_problems) == (1, 1)
    plain = asyncio.run(gather(FakeServer(accept=1, gamma=0), PROMPTS))
    assert plain.accept_length is None and plain.num_right is None


def test_state_left_behind_by_sampling_is_seen() -> None:
    sampled = []

    def change(ask: Ask, ids: list[int]) -> list[int]:
        sampled.append(ask.temperature > 0)
        return [ids[0] + 1, *ids[1:]] if any(sampled) else ids

    many = PROMPTS * STATE_PROMPTS
    server = FakeServer(change=change)
    found = asyncio.run(gather(server, many))
    assert len(server.calls) == len(many) + 2 * STATE_PROMPTS
    assert len(found.greedy) == len(many)
    assert found.greedy[:STATE_PROMPTS] != found.greedy_again
    judged = {gate.name: gate for gate in judge(found, found)}
    assert judged["bytes"].passed and not judged["state of A"].passed
    assert f"{STATE_PROMPTS} of {STATE_PROMPTS}" in judged["state of A"].evidence


def test_right_answers() -> None:
    assert is_right("She pays $1,050.00.", "#### 1050")
    assert not is_right("I do not know", "#### 3")
    assert not is_right("3", "without a number")
