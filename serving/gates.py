"""Whether a change leaves what is generated alone: the gates before any speed is believed.

    bytes     greedy answers of 256 tokens are equal token for token
    accept    accept lengths differ by at most 0.05
    state     greedy answers are the same again after sampled requests have run in between
    score     exact matches on GSM8K are at least as many, within chance

A change that rounds otherwise, declared as such, is judged by its score instead of its bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from serving.bench import Workload, drafts_per_round, run_once
from serving.measure import Answer, answer_all, summarize
from serving.server import Server
from serving.workload import Prompt, final_number

GREEDY_TOKENS = 256
ACCEPT_TOLERANCE = 0.05
SAMPLED_TEMPERATURE = 0.8
STATE_PROMPTS = 32
"""Of the prompts, that are sampled and then asked again."""


@dataclass(frozen=True, slots=True)
class Gate:
    """One gate's outcome."""

    name: str
    passed: bool
    binding: bool
    """Whether it decides; a declared rounding takes that from the bytes."""
    evidence: str


@dataclass(frozen=True, slots=True)
class Evidence:
    """What one server has answered."""

    greedy: tuple[tuple[int, ...], ...]
    greedy_again: tuple[tuple[int, ...], ...]
    """Of the first prompts."""
    accept_length: float | None
    """None where the target decodes alone."""
    num_right: int | None
    """None without problems to solve."""
    num_problems: int


async def gather(
    server: Server,
    prompts: Sequence[Prompt],
    *,
    decode_text: Callable[[Sequence[int]], str] | None = None,
    stop_token_ids: tuple[int, ...] = (),
    answer_tokens: int = 512,
    concurrency: int = 1,
    sampled_concurrency: int = 8,
) -> Evidence:
    """Ask a server everything that the gates need.

    Greedy answers are asked for one at a time: in a batch, other requests change the shape of the
    products and with it the rounding.

    Args:
        prompts: those with an `answer` are problems whose score counts.
        decode_text: token ids to text; without it no score is taken.
        answer_tokens: longest solution; greedy answers that are long enough are taken for it.
        concurrency: of solutions. A batch may run other kernels than a single request.
    """
    block_size = await drafts_per_round(server)
    work = Workload(prompts, GREEDY_TOKENS, stop_token_ids=stop_token_ids)
    first, wall = await answer_all(server.ask, work.asks(), 1)
    report = summarize([p.domain for p in prompts], first, wall, block_size, {})
    few = replace(work, prompts=list(prompts)[:STATE_PROMPTS])
    sampled = replace(few, temperature=SAMPLED_TEMPERATURE, concurrency=sampled_concurrency)
    # Sampled requests of several kinds leave their traces in whatever state is shared.
    await run_once(server, sampled, block_size)
    again, _ = await answer_all(server.ask, few.asks(), 1)
    problems = [p for p in prompts if p.answer] if decode_text is not None else []
    num_right: int | None = None
    if problems and decode_text is not None:
        if answer_tokens == GREEDY_TOKENS and concurrency == 1:
            solutions = [a for a, p in zip(first, prompts, strict=True) if p.answer]
        else:
            solving = Workload(problems, answer_tokens, stop_token_ids=stop_token_ids)
            solutions, _ = await answer_all(server.ask, solving.asks(), concurrency)
        num_right = sum(
            is_right(decode_text(s.token_ids), p.answer)
            for s, p in zip(solutions, problems, strict=True)
        )
    return Evidence(
        _tokens(first),
        _tokens(again),
        report.accept_length if block_size else None,
        num_right,
        len(problems),
    )


def _tokens(answers: Sequence[Answer]) -> tuple[tuple[int, ...], ...]:
    return tuple(answer.token_ids for answer in answers)


def is_right(text: str, solution: str) -> bool:
    """Whether an answer comes to the solution's number."""
    wanted = final_number(solution)
    return wanted is not None and final_number(text) == wanted


def judge(first: Evidence, second: Evidence, *, declared_rounding: bool = False) -> list[Gate]:
    """The gates between what is served and what is to replace it.

    Args:
        declared_rounding: the change is known to round otherwise; the score then decides, and must
            have been taken.
    """
    different = _first_differences(first.greedy, second.greedy)
    gates = [
        Gate(
            "bytes",
            not different,
            not declared_rounding,
            f"{len(different)} of {len(first.greedy)} greedy answers differ"
            + (f", the first from token {different[0][1]} on" if different else ""),
        )
    ]
    if first.accept_length is not None and second.accept_length is not None:
        change = second.accept_length - first.accept_length
        gates.append(
            Gate(
                "accept",
                abs(change) <= ACCEPT_TOLERANCE,
                True,
                f"{first.accept_length:.3f} and {second.accept_length:.3f}, allowed "
                f"{ACCEPT_TOLERANCE}",
            )
        )
    for name, side in (("A", first), ("B", second)):
        again = side.greedy_again
        changed = _first_differences(side.greedy[: len(again)], again)
        gates.append(
            Gate(
                f"state of {name}",
                not changed,
                True,
                f"{len(changed)} of {len(again)} greedy answers changed after sampled ones",
            )
        )
    gates.append(_score(first, second, declared_rounding))
    return gates


def _score(first: Evidence, second: Evidence, declared_rounding: bool) -> Gate:
    if first.num_right is None or second.num_right is None:
        return Gate("score", not declared_rounding, declared_rounding, "not taken")
    allowed = score_allowance(first.num_right, first.num_problems)
    return Gate(
        "score",
        second.num_right >= first.num_right - allowed,
        declared_rounding,
        f"{first.num_right} and {second.num_right} of {first.num_problems} right, allowed "
        f"{allowed} fewer",
    )


def score_allowance(num_right: int, number: int) -> int:
    """How many fewer right answers chance explains: two standard deviations, rounded down."""
    # 2 sqrt(n p (1 - p)) in whole numbers.
    return math.isqrt(4 * num_right * (number - num_right) // number) if number else 0


def _first_differences(
    first: Sequence[Sequence[int]], second: Sequence[Sequence[int]]
) -> list[tuple[int, int]]:
    """Answers that differ, each with the first token at which it does."""
    found = []
    for index, (a, b) in enumerate(zip(first, second, strict=True)):
        if a != b:
            same = 0
            while same < min(len(a), len(b)) and a[same] == b[same]:
                same += 1
            found.append((index, same))
    return found


def gates_to_dict(gates: Sequence[Gate]) -> dict[str, Any]:
    """Ready for JSON, with the verdict of all that bind."""
    return {
        "passed": all(g.passed for g in gates if g.binding),
        "gates": [
            {"name": g.name, "passed": g.passed, "binding": g.binding, "evidence": g.evidence}
            for g in gates
        ],
    }
