"""The script of the figures writes what it promises, and says what failed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from fake_server import FakeServer
from fake_trace import dspark_steps
from test_launch import sglang_folder

from benchmarks import serving as script
from serving.hooks_fold import SGLANG_SWITCHES, parse_parts
from serving.profiles import Profile, Request, build_launch
from serving.server import ServerError
from serving.surface import known_environment
from serving.trace import make_trace
from splitserve.serving_options import MeasureOptions

NEEDED = {
    "plain_tpot_ms",
    "default_step_ms",
    "step_ms",
    "default_idle_fraction",
    "idle_fraction",
    "accept_length",
}


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> AsyncIterator[list[Any]]:
    seen: list[MeasureOptions] = []

    async def open_server(
        stack: AsyncExitStack, options: MeasureOptions, *_: Any, **__: Any
    ) -> FakeServer:
        seen.append(options)
        if options.profile == "nextn":
            raise ServerError("no such layer")
        if options.profile == "plain":
            return FakeServer(accept=1, gamma=0, step_ms=lambda: 3.0)
        return FakeServer(step_ms=lambda: 0.25 if options.fold == "all" else 0.5)

    async def traced(*_: Any) -> list[Any]:
        return [make_trace(dspark_steps())]

    monkeypatch.setattr(script, "open_server", open_server)
    monkeypatch.setattr(script, "traced", traced)
    monkeypatch.chdir(tmp_path)
    return seen  # type: ignore[return-value]


def record(tmp_path: Path, model: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((tmp_path / "r" / f"serving_{model}.json").read_text())
    return found


def test_every_figure_is_written(opened: list[MeasureOptions], tmp_path: Path) -> None:
    assert script.main(["8b", "--folder", "r", "--number", "1"]) == 0
    found = record(tmp_path, "8b")
    figures = found["figures"]
    assert set(figures) >= NEEDED
    assert figures["step_ratio"] == pytest.approx(2.0)
    assert figures["step_ratio_512"] == pytest.approx(2.0)
    assert figures["gates_passed"] is True
    # The trace's step of 0.3 ms is idle for 0.077; without profiling it takes 0.25.
    assert figures["idle_fraction"] == pytest.approx((77 - 50) / 250)
    assert figures["default_idle_fraction"] > figures["idle_fraction"]
    assert [o.fold for o in opened] == ["none", "all", "none", "none"]
    assert {o.args["load_format"] for o in opened} == {"dummy"}


def test_a_part_that_fails_is_said_and_the_others_stay(
    opened: list[MeasureOptions], tmp_path: Path
) -> None:
    assert script.main(["ling3", "--parts", "nextn", "plain", "--folder", "r"]) == 1
    figures = record(tmp_path, "ling3")["figures"]
    assert figures["failed_nextn"] == "no such layer"
    assert figures["plain_tpot_ms"] == pytest.approx(3.0)
    assert script.main(["ling3", "--parts", "pair", "--folder", "r", "--add"]) == 0
    later = ["--parts", "compact", "--folder", "r", "--add", "r/serving_ling3.json"]
    assert script.main(["ling3", *later]) == 0
    assert {"step_ms", "compact_step_ms"} <= set(record(tmp_path, "ling3")["figures"])


def test_what_fails_alone_leaves_an_earlier_record(
    opened: list[MeasureOptions], tmp_path: Path
) -> None:
    assert script.main(["ling3", "--parts", "plain", "--folder", "r"]) == 0
    before = record(tmp_path, "ling3")
    assert script.main(["ling3", "--parts", "nextn", "--folder", "r"]) == 1
    assert record(tmp_path, "ling3") == before


def test_kernels_of_our_own_need_not_give_the_same_bytes(
    opened: list[MeasureOptions], tmp_path: Path
) -> None:
    options = ["--parts", "pair", "--kernels", "all", "--folder", "r", "--number", "1"]
    assert script.main(["8b", *options]) == 0
    figures = record(tmp_path, "8b")["figures"]
    assert [o.kernels for o in opened] == ["none", "all"]
    binding = {gate["name"]: gate["binding"] for gate in figures["gates"]}
    assert binding == {"bytes": False, "accept": True, "state of A": True, "state of B": True}
    assert figures["gates_passed"] is True


def test_without_a_timing_there_is_no_census(
    opened: list[MeasureOptions], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    once = script.open_server

    async def open_server(
        stack: AsyncExitStack, options: MeasureOptions, work: Any, name: str, **more: Any
    ) -> Any:
        if name == "changed":
            raise ServerError("it does not start")
        return await once(stack, options, work, name, **more)

    monkeypatch.setattr(script, "open_server", open_server)
    assert script.main(["8b", "--parts", "pair", "plain", "--folder", "r"]) == 1
    figures = record(tmp_path, "8b")["figures"]
    assert figures["failed_pair"] == "it does not start"
    assert "plain_tpot_ms" in figures and "default_idle_fraction" not in figures


def test_an_engine_that_dies_is_started_again(
    opened: list[MeasureOptions], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    once = script.open_server
    started: list[str] = []

    class Dying(FakeServer):
        async def ask(self, ask: Any) -> Any:
            raise ServerError("the engine ended")

    async def open_server(
        stack: AsyncExitStack, options: MeasureOptions, work: Any, name: str, **more: Any
    ) -> Any:
        started.append(name)
        if name == "glue":
            raise PermissionError("no such folder")
        server = await once(stack, options, work, name, **more)
        return Dying() if started.count(name) == 1 and name == "default" else server

    monkeypatch.setattr(script, "open_server", open_server)
    given = ["--parts", "pair", "each", "--only", "glue", "accept", "--beside", "3"]
    assert script.main(["8b", *given, "--folder", "r"]) == 1
    figures = record(tmp_path, "8b")["figures"]
    assert figures["failed_pair"] == "the engine ended"
    assert figures["failed_each"] == "no such folder"
    assert "each_accept_ratio" in figures
    # Nothing is started for what does not start, and nothing twice but who has died.
    assert sorted(started) == ["accept", "changed", "default", "default", "glue"]


@pytest.mark.parametrize("content", [None, "", "kept"])
def test_kernels_are_timed_by_one_engine_at_a_time(
    content: str | None,
    opened: list[MeasureOptions],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    once = script.open_server
    starting: set[str] = set()
    most: list[int] = []

    async def open_server(
        stack: AsyncExitStack, options: MeasureOptions, work: Any, name: str, **more: Any
    ) -> Any:
        if options.kernels != "none":
            starting.add(name)
            most.append(len(starting))
            await asyncio.sleep(0.01)
            starting.remove(name)
        return await once(stack, options, work, name, **more)

    monkeypatch.setattr(script, "open_server", open_server)
    if content is not None:
        (tmp_path / "choices").write_text(content)
    monkeypatch.setenv(script.CHOICES, str(tmp_path / "choices"))
    few = ["kernels_mlp", "kernels_linear", "kernels_norm"]
    given = ["--parts", "each", "--only", *few, "--beside", "4", "--folder", "r"]
    assert script.main(["8b", *given]) == 0
    assert max(most) == (3 if content else 1)


def test_each_switch_is_compared_alone(opened: list[MeasureOptions], tmp_path: Path) -> None:
    assert script.main(["8b", "--parts", "each", "--folder", "r", "--number", "1"]) == 0
    figures = record(tmp_path, "8b")["figures"]
    ratios = {name for name in figures if name.endswith("_ratio")}
    assert ratios == {f"each_{name}_ratio" for name in script.EACH}
    folds = [o.fold for o in opened if o.fold != "none"]
    assert all(parse_parts(fold) for fold in folds)
    # What one comparison adds leaves the arguments of all in place.
    assert all(o.args["load_format"] == "dummy" for o in opened)
    assert {o.args.get("stream_interval") for o in opened} == {None, 8}
    known = known_environment(sglang_folder())
    assert {name for o in opened for name in o.env} <= known
    assert set(SGLANG_SWITCHES) <= known
    few = ["--parts", "each", "--only", "glue", "--folder", "few"]
    assert script.main(["8b", *few]) == 0
    figures = json.loads((tmp_path / "few" / "serving_8b.json").read_text())["figures"]
    assert [n for n in figures if n.endswith("_ratio")] == ["each_glue_ratio"]


@pytest.mark.parametrize("most", [2, 4])
def test_no_more_engines_share_the_gpu_than_may(
    most: int, opened: list[MeasureOptions], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alive: list[str] = []
    seen: list[int] = []
    once = script.open_server

    async def open_server(
        stack: AsyncExitStack, options: MeasureOptions, work: Any, name: str, **more: Any
    ) -> Any:
        server = await once(stack, options, work, name, **more)
        assert options.args.get("mem_fraction_static") == (None if most == 2 else script.MEMORY)
        alive.append(name)
        seen.append(len(alive))
        stack.callback(alive.remove, name)
        return server

    async def traced(server: FakeServer, *_: Any) -> list[Any]:
        profiled.append((server, len(server.calls)))
        return [make_trace(dspark_steps())]

    profiled: list[tuple[FakeServer, int]] = []
    monkeypatch.setattr(script, "traced", traced)
    monkeypatch.setattr(script, "open_server", open_server)
    few = ["glue", "accept", "mid_fold", "kernels_linear"]
    parts = ["--parts", "pair", "nextn", "plain", "compact", "each", "--only", *few]
    given = [*parts, "--beside", str(most), "--folder", "r", "--number", "1"]
    # One that does not start leaves the others of its group.
    assert script.main(["ling3", *given]) == 1
    assert max(seen) == most
    assert not alive
    # Who has been profiled is asked nothing more.
    assert len(profiled) == 2
    assert all(len(server.calls) == before > 0 for server, before in profiled)
    figures = record(tmp_path, "ling3")["figures"]
    assert "failed_nextn" in figures
    assert NEEDED | {"compact_step_ms"} | {f"each_{name}_ratio" for name in few} <= set(figures)


def test_smollm2_needs_its_folders(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for given, message in (
        (["smollm2"], "smollm2 takes --target and --draft"),
        (["8b", "--number", "0"], "a whole number from 1"),
        (["8b", "--rounds", "1"], "a whole number from 2"),
        (["8b", "--tokens", "1"], "a whole number from 2"),
        (["8b", "--beside", "1"], "a whole number from 2"),
        (["8b", "--args", "foo"], "allowed: NAME=VALUE"),
        (["8b", "--args", "foo=["], "allowed: NAME=VALUE"),
    ):
        with pytest.raises(SystemExit):
            script.main([*given, "--folder", str(tmp_path)])
        assert message in capsys.readouterr().err


@pytest.mark.parametrize("model", ["8b", "ling3_tiny", "ling3"])
def test_random_targets_can_be_served(model: str, tmp_path: Path) -> None:
    target, draft = script.write_configs(model, tmp_path, 7)
    for profile in (Profile.DSPARK_STATIC, Profile.DSPARK_COMPACT):
        request = Request(profile, target, draft, arguments={"load_format": "dummy"})
        assert build_launch(request).argument_dict()["speculative_algorithm"] == "DSPARK"
    if model == "ling3":
        build_launch(Request(Profile.NEXTN, target))
