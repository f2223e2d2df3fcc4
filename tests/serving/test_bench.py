"""Step time, peak, and a verdict only where the difference exceeds the spread."""

from __future__ import annotations

import ast
import asyncio
import itertools
import json
from pathlib import Path

import pytest
from fake_server import FakeServer
from test_launch import sglang_folder

from serving.bench import Workload, compare, drafts_per_round, peak_of, run_once
from serving.bench_client import FIGURES, client_command, read_output
from serving.measure import Answer
from serving.workload import Prompt, final_number, random_prompts, read_prompts

PROMPTS = tuple(Prompt("a", (n, n + 1)) for n in range(4))


def test_step_time_is_tpot_times_accept_length() -> None:
    server = FakeServer(accept=2, step_ms=lambda: 5.0)
    run = asyncio.run(run_once(server, Workload(PROMPTS, 21, concurrency=2), 3))
    figures = run.figures()
    assert figures["accept_length"] == 2.0
    assert figures["mean_tpot_ms"] == pytest.approx(2.5)
    assert figures["step_ms"] == pytest.approx(5.0)
    assert figures["num_rounds"] == 40
    assert figures["mean_ttft_ms"] == pytest.approx(500.0)
    # 50 ms of decoding hold no two windows of a second.
    assert figures["peak"] is None
    assert server.most == 2
    assert {ask.max_new_tokens for ask in server.calls} == {21}


def test_a_target_alone_takes_one_step_a_token() -> None:
    server = FakeServer(accept=1, gamma=0, step_ms=lambda: 3.0)
    assert asyncio.run(drafts_per_round(server)) == 0
    run = asyncio.run(run_once(server, Workload(PROMPTS, 11), 0))
    assert run.step_ms == pytest.approx(3.0)


def arrivals(times: list[float]) -> Answer:
    return Answer({}, 0.0, times[0], times[-1], (), tuple((t, n) for n, t in enumerate(times)))


def test_the_peak_of_steady_tokens_is_their_rate_in_every_phase() -> None:
    peak = peak_of([arrivals([n / 100 for n in range(500)])], 1.0, 4)
    assert peak is not None
    # A window's edge may cut one token off.
    assert peak.low >= 99 and peak.high <= 101


def test_a_burst_that_straddles_windows_widens_the_band() -> None:
    slow = [n / 10 for n in range(80)]
    burst = [3.5 + n / 1000 for n in range(1000)]
    peak = peak_of([arrivals(slow), arrivals(burst)], 1.0, 8)
    assert peak is not None
    assert peak.high >= 980
    assert peak.low <= 600
    assert peak.low <= peak.tokens_per_second <= peak.high


def test_a_short_run_has_no_peak() -> None:
    assert peak_of([arrivals([0.0, 1.0, 1.9])], 1.0) is None
    assert peak_of([arrivals([0.0])], 1.0) is None


def cycle(*values: float):  # type: ignore[no-untyped-def]
    steps = itertools.cycle(values)
    return lambda: next(steps)


def test_runs_are_interleaved_and_a_clear_difference_is_named() -> None:
    order: list[str] = []

    def noted(name: str, *values: float):  # type: ignore[no-untyped-def]
        step = cycle(*values)

        def take() -> float:
            order.append(name)
            return step()

        return take

    a, b = FakeServer(step_ms=noted("a", 6.0, 6.1)), FakeServer(step_ms=noted("b", 5.0, 5.1))
    work = Workload(PROMPTS[:1], 21)
    found = asyncio.run(compare((a, b), ("old", "new"), work, rounds=4, warm_up=1))
    assert "".join(order) == "ab" + "ab" + "ba" + "ab" + "ba"
    assert found.spread_ms == pytest.approx(0.1)
    assert found.verdict.startswith("new is 1.19")
    assert found.to_dict()["step_ms"]["new"] == pytest.approx(5.05)


def test_a_difference_within_the_spread_is_no_verdict() -> None:
    a, b = FakeServer(step_ms=cycle(5.0, 6.0)), FakeServer(step_ms=cycle(5.4, 5.3))
    work = Workload(PROMPTS[:1], 21)
    found = asyncio.run(compare((a, b), ("old", "new"), work, rounds=4))
    assert found.verdict == "no difference beyond the spread"
    with pytest.raises(ValueError, match="rounds=1"):
        asyncio.run(compare((a, b), ("old", "new"), work, rounds=1))


# --- workloads -----------------------------------------------------------------------------------


def test_random_prompts_are_the_same_each_time_and_no_two_alike() -> None:
    first, again = random_prompts(3, 50, 1000), random_prompts(3, 50, 1000)
    assert first == again
    assert len({p.token_ids for p in first}) == 3
    assert all(len(p.token_ids) == 50 and max(p.token_ids) < 1000 for p in first)
    assert random_prompts(1, 50, 1000, seed=1)[0] != first[0]


def encode(messages: object) -> list[int]:
    return [len(json.dumps(messages))]


def test_prompts_are_read_by_domain(tmp_path: Path) -> None:
    rows = [
        {"domain": d, "messages": [{"role": "user", "content": d * n}], "answer": f"#### {n}"}
        for n, d in enumerate(["x", "y", "x", "x", "y"])
    ]
    file = tmp_path / "p.jsonl"
    file.write_text("\n".join(json.dumps(r) for r in rows) + "\n\n")
    assert [p.domain for p in read_prompts(file, encode)] == ["x", "y", "x", "x", "y"]
    assert [p.answer for p in read_prompts(file, encode, domains=["y"])] == ["#### 1", "#### 4"]
    assert len(read_prompts(file, encode, number=2)) == 2
    with pytest.raises(ValueError, match=r"none\.jsonl' cannot be read .*check the path"):
        read_prompts(tmp_path / "none.jsonl", encode)
    assert [p.domain for p in read_prompts(file, encode, per_domain=1)] == ["x", "y"]
    with pytest.raises(ValueError, match="has no prompt"):
        read_prompts(file, encode, domains=["z"])
    file.write_text('{"domain": "x"}')
    with pytest.raises(ValueError, match=r"p\.jsonl:1"):
        read_prompts(file, encode)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("He has <<3*4=12>>12 left.\n#### 1,234", "1234"),
        ("so it is $18.50 in all", "18.5"),
        ("The answer is 42.", "42"),
        ("it fell by -3", "-3"),
        ("7.00", "7"),
        ("none", None),
    ],
)
def test_the_final_number(text: str, number: str | None) -> None:
    assert final_number(text) == number


# --- SGLang's own client -------------------------------------------------------------------------


def test_the_client_takes_the_flags_and_writes_the_figures(tmp_path: Path) -> None:
    source = (sglang_folder() / "benchmark" / "serving.py").read_text()
    command = client_command(
        "http://x",
        "t",
        tmp_path / "o",
        input_tokens=8192,
        output_tokens=1024,
        number=4,
        concurrency=1,
        seed=0,
    )
    texts = {n.value for n in ast.walk(ast.parse(source)) if isinstance(n, ast.Constant)}
    assert [w for w in command if w.startswith("--") and w not in texts] == []
    assert {"random-ids", *FIGURES} <= texts


def test_the_running_average_of_the_client_is_not_read() -> None:
    line = json.dumps({**dict.fromkeys(FIGURES, 1.0), "accept_length": 9.9})
    found = read_output(f"{{}}\n{line}\n")
    assert set(found) == set(FIGURES)
    with pytest.raises(ValueError, match="mean_ttft_ms"):
        read_output('{"completed": 1}')
