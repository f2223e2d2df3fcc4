"""The commands around a server, with one that answers by a rule."""

from __future__ import annotations

import gzip
import json
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from fake_server import FakeServer
from fake_trace import dspark_steps
from test_contract import DRAFT, TARGET
from test_profiles import folder

from serving.launch_spec import Launch
from serving.trace import make_trace
from splitserve import cli, serving_commands, serving_options, serving_run
from splitserve.options import parse_options
from splitserve.serving_options import (
    MeasureOptions,
    graph_sizes,
    measuring_launch,
    second_side,
)

NOBODY = "url=http://127.0.0.1:9"
"""The port of the discard service, where nobody listens."""


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    handler = signal.getsignal(signal.SIGTERM)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(serving_options, "require_sglang", lambda: "0")
    monkeypatch.setattr(serving_options, "check_surface", lambda launch: None)
    yield
    signal.signal(signal.SIGTERM, handler)


@pytest.fixture
def paths(tmp_path: Path) -> list[str]:
    target = folder(tmp_path / "target", {**TARGET, "eos_token_id": 3}, ())
    return [f"target={target}", f"draft={folder(tmp_path / 'draft', DRAFT)}", "gpu=hopper"]


def write_trace(folder: Path) -> Path:
    """A trace file of rank 0."""
    file = folder / "1-TP-0.trace.json.gz"
    with gzip.open(file, "wt") as stream:
        json.dump({"traceEvents": dspark_steps()}, stream)
    return file


class Started:
    """Engines that commands have started, as fakes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *servers: FakeServer) -> None:
        self.launches: list[Launch] = []
        self._servers = list(servers)

        @asynccontextmanager
        async def running(launch: Launch, log: Path) -> AsyncIterator[FakeServer]:
            self.launches.append(launch)
            yield self._servers[min(len(self.launches), len(self._servers)) - 1]

        monkeypatch.setattr(serving_run, "running", running)


def last(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    return found


def test_a_line_is_printed_with_its_reasons(
    paths: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["serve", "profile=dspark_static", *paths, "fold=all", "dry_run=true"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].startswith("SGLANG_RAGGED_VERIFY_MODE=static SPLITSERVE_FOLD=accept,commit")
    assert "--attention-backend fa3" in lines[-1]
    assert any(line.startswith("# attention_backend=fa3: ") for line in lines)


def test_what_is_not_sglangs_is_said(paths: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    def said(*words: str) -> str:
        assert cli.main(["serve", *paths, "dry_run=true", *words]) == 0
        captured = capsys.readouterr()
        assert ("SPLITSERVE_" in captured.out) == ("are shortened" in captured.err)
        return captured.err

    static = "profile=dspark_static"
    assert "fold=none kernels=none leaves them to SGLang" in said(static)
    assert "are shortened" in said(static, "kernels=none")
    assert said(static, "fold=none", "kernels=none") == ""
    assert "splitserve: fold=all kernels=all can shorten" in said(static, "tp=2")
    # Blackwell's attention is not FlashAttention 3.
    blackwell = said(static, "gpu=blackwell")
    assert "fold=all can shorten" in blackwell and "kernels=all" not in blackwell
    assert said("profile=dspark_compact") == ""


def test_a_target_that_is_not_at_hand_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve", "target=nobody/nothing", "gpu=hopper", "dry_run=true"]) == 0
    captured = capsys.readouterr()
    assert "hf download nobody/nothing config.json" in captured.err
    assert "--attention-backend" not in captured.out


def test_a_server_takes_the_place_of_the_command(
    paths: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []

    def execve(path: str, words: list[str], environment: dict[str, str]) -> None:
        seen[:] = [path, words, environment]
        raise KeyboardInterrupt

    monkeypatch.setattr("os.execve", execve)
    assert cli.main(["serve", "profile=dspark_static", *paths, "args.port=1", "env.X=2"]) == 130
    assert seen[0] == sys.executable and seen[1][1:3] == ["-m", "sglang.launch_server"]
    assert seen[1][-2:] == ["--port", "1"] and seen[2]["X"] == "2"


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["serve", "profile=dspark"], "did you mean"),
        (["serve", "gpu=volta"], "hopper"),
        (["serve", "profile=plain"], "name it with target=FOLDER"),
        (["serve", "profil=plain"], "profil"),
        (["bench", "client=vllm"], "sglang"),
        (["bench", "client=sglang"], "one server at url="),
        (["gate", "http://a"], "two addresses"),
        (["sweep", "what=all"], "drafts"),
        (["serve", "target=/no/folder", "gpu=hopper"], "check the path"),
        (["serve", "target=a/b", "tp=0"], "tp=0 is not usable; allowed: 1 or more"),
        (["serve", "target=a/b", "block_size=-1"], "block_size=-1"),
        (["serve", "target=a/b", "context_length=-1"], "context_length=-1"),
        (["bench", "url=foo"], "http://127.0.0.1:30000"),
        (["bench", "url=http://"], "http://127.0.0.1:30000"),
        (["bench", "url=http://127.0.0.1:99999"], "http://127.0.0.1:30000"),
        (["bench", NOBODY], "the address of an SGLang server that runs"),
        (["bench", NOBODY, "prompts=/no/file"], "target=''"),
        (["bench", NOBODY, "prompts=/no/file", "target=/no/folder"], "no tokenizer that loads"),
        (["gate", NOBODY, "against.tp=2", "prompts=/no/file"], "target=''"),
        (["bench", NOBODY, "number=0"], "number=0"),
        (["bench", NOBODY, "input_tokens=0"], "input_tokens=0"),
        (["bench", NOBODY, "output_tokens=0"], "output_tokens=0"),
        (["bench", NOBODY, "temperature=nan"], "temperature=nan"),
        (["bench", NOBODY, "concurrency=[]"], "concurrency=[]"),
        (["bench", NOBODY, "concurrency=[0]"], "concurrency=[0]"),
        (["gate", "http://127.0.0.1:9", "there"], "second_url='there'"),
        (["audit", NOBODY], "the address of an SGLang server that runs"),
        (["census", NOBODY], "the address of an SGLang server that runs"),
        (["sweep", "what=drafts", "lengths=[]"], "lengths=[]"),
        (["sweep", "what=drafts", "lengths=[-1]"], "lengths=[-1]"),
        (["sweep", NOBODY, "what=sps"], "a sweep starts servers of its own"),
    ],
)
def test_bad_input_is_one_line(
    words: list[str],
    text: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(words) == 2
    error = capsys.readouterr().err
    assert text in error and len(error.strip().splitlines()) == 1


def test_a_workload_beyond_the_targets_positions_is_refused(paths: list[str]) -> None:
    folder = Path(paths[0].partition("=")[2])
    config = json.loads((folder / "config.json").read_text())
    config["max_position_embeddings"] = 1000
    (folder / "config.json").write_text(json.dumps(config))
    options = parse_options(MeasureOptions, [*paths, "profile=dspark_static"], nested=True)
    with pytest.raises(ValueError, match=r"input_tokens=8192 .*within 936 tokens") as caught:
        measuring_launch(options, longest=937)
    assert "1000 positions" in str(caught.value)
    measuring_launch(options, longest=936)


def test_figures_outlive_a_file_that_cannot_be_written(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "taken").write_text("")
    trace = write_trace(tmp_path)
    out = tmp_path / "taken" / "out.json"
    assert cli.main(["census", f"traces=[{trace}]", f"folder={tmp_path}", f"out={out}"]) == 2
    captured = capsys.readouterr()
    assert "profiled_step_ms" in json.loads(captured.out.strip().splitlines()[-1])
    assert f"out='{out}' is not usable" in captured.err


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.json", b"{"),
        ("a.json", b"\xff\xfe"),
        ("a.json", b'{"traceEvents": 5}'),
        ("a.json", b'{"traceEvents": [5]}'),
        ("a.json", b'{"traceEvents": [{"ph": "X"}]}'),
        ("a.json.gz", b"xx"),
        ("a.json.gz", b"\x1f\x8b\x08\0\0\0\0\0\0\xff\xff\xff"),
    ],
)
def test_a_file_that_is_no_trace_is_one_line(
    name: str, content: bytes, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(content)
    assert cli.main(["census", f"traces=[{tmp_path / name}]"]) == 2
    error = capsys.readouterr().err
    assert f"{name}' cannot be read" in error and len(error.strip().splitlines()) == 1


def test_bench_measures_each_concurrency(
    paths: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    started = Started(monkeypatch, FakeServer())
    words = ["profile=dspark_static", "concurrency=[1,4]", "input_tokens=40", "output_tokens=21"]
    assert cli.main(["bench", *paths, *words, "out=x/bench.json"]) == 0
    runs = last(capsys)["runs"]
    assert set(runs) == {"1", "4"}
    assert runs["1"]["step_ms"] == pytest.approx(4.0)
    assert json.loads(Path("x/bench.json").read_text())["runs"] == runs
    arguments = started.launches[0].argument_dict()
    # A trace decodes longer than what is asked for, up to the target's own length.
    assert arguments["context_length"] == 2048
    assert arguments["cuda_graph_bs_decode"] == [1, 2, 4]
    assert arguments["skip_tokenizer_init"] is True
    assert arguments["max_total_tokens"] == 5 * 2048


def test_bench_compares_two_settings(
    paths: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    slow, quick = FakeServer(step_ms=lambda: 6.0), FakeServer(step_ms=lambda: 4.0)
    started = Started(monkeypatch, slow, quick)
    words = ["profile=dspark_static", "input_tokens=9", "against.fold=all", "rounds=2", "number=1"]
    # The profile folds by itself here.
    assert cli.main(["bench", *paths, *words]) == 2
    assert "both come to the same settings" in capsys.readouterr().err
    assert not started.launches
    assert cli.main(["bench", *paths, *words, "fold=none"]) == 0
    found = last(capsys)["comparison"]["1"]
    assert found["verdict"] == "B is 1.500 x faster than A"
    first, second = (launch.environment_dict() for launch in started.launches)
    assert "SPLITSERVE_FOLD" not in first
    assert second["SPLITSERVE_FOLD"] == "accept,commit,relay,glue"
    assert {x.argument_dict()["mem_fraction_static"] for x in started.launches} == {0.4}


def test_a_gate_that_fails_is_the_exit_code(
    paths: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["profile=dspark_static", "against.profile=plain", "input_tokens=9", "number=2"]
    Started(monkeypatch, FakeServer(), FakeServer(accept=1, gamma=0, num_rounds=20))
    assert cli.main(["gate", *paths, *words]) == 0
    assert last(capsys)["passed"] is True
    wrong = FakeServer(accept=1, gamma=0, num_rounds=20, change=lambda ask, ids: [*ids[:-1], 0])
    Started(monkeypatch, FakeServer(), wrong)
    assert cli.main(["gate", *paths, *words]) == 1
    found = last(capsys)
    assert [g["name"] for g in found["gates"] if not g["passed"]] == ["bytes"]
    assert cli.main(["gate", *paths, "profile=dspark_static"]) == 2


def test_the_audit_reads_its_own_counters(
    paths: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    started = Started(monkeypatch, FakeServer())

    async def traced(*_: Any) -> list[Any]:
        stem = started.launches[0].environment_dict()["SPLITSERVE_AUDIT"]
        counts = {"verify_graph": 9, "accept_eager": 9}
        Path(f"{stem}.1.json").write_text(json.dumps({"counts": counts, "facts": {}}))
        return [make_trace(dspark_steps())]

    monkeypatch.setattr(serving_commands, "traced", traced)
    (tmp_path / "serving").mkdir()
    (tmp_path / "serving" / "audit.7.json").write_text("left by an earlier one")
    assert cli.main(["audit", *paths, "profile=dspark_static", "input_tokens=9"]) == 0
    rows = {row["name"]: row for row in last(capsys)["rows"]}
    assert rows["accept in the verify graph"]["is_problem"] is True
    assert rows["target from graphs"]["state"] == "active"


def test_the_census_of_trace_files(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = write_trace(tmp_path)
    assert cli.main(["census", f"traces=[{file}]", "picture=c.svg"]) == 0
    found = last(capsys)
    assert found["profiled_step_ms"] == pytest.approx(0.3)
    assert Path("c.svg").read_text().startswith("<svg")
    assert cli.main(["census", f"traces=[{tmp_path / 'none.json'}]"]) == 2


def test_the_census_of_a_server_is_calibrated(
    paths: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Started(monkeypatch, FakeServer(step_ms=lambda: 0.25))

    async def traced(*_: Any) -> list[Any]:
        return [make_trace(dspark_steps())]

    monkeypatch.setattr(serving_commands, "traced", traced)
    assert cli.main(["census", *paths, "profile=dspark_static", "input_tokens=9"]) == 0
    found = last(capsys)
    assert found["unprofiled_step_ms"] == pytest.approx(0.25)
    assert found["idle_fraction"] == pytest.approx((77 - 50) / 250)
    assert Path("serving/census.html").is_file()


def test_a_sweep_of_draft_lengths(
    paths: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = FakeServer(accept=1, gamma=0, step_ms=lambda: 3.0)
    two, three = FakeServer(accept=2, gamma=2), FakeServer(accept=2, gamma=5, step_ms=lambda: 5.0)
    started = Started(monkeypatch, plain, two, three)
    words = ["profile=dspark_static", "lengths=[0,2,5]", "input_tokens=9"]
    assert cli.main(["sweep", *paths, *words]) == 0
    text = capsys.readouterr().out
    found = json.loads(text.strip().splitlines()[-1])
    assert found["best_num_drafts"] == 2
    assert "2 -> 5 drafts: accept +0.0 % <= step +25.0 %: does not pay" in text
    sizes = [x.argument_dict().get("speculative_dspark_block_size") for x in started.launches]
    assert sizes == [None, 2, 5]
    assert "speculative_algorithm" not in started.launches[0].argument_dict()


def test_the_table_is_written_and_a_server_is_started_with_it(
    paths: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    started = Started(monkeypatch, FakeServer())
    words = ["what=sps", "profile=dspark_compact", "concurrency=[1,2]", "input_tokens=9"]
    assert cli.main(["sweep", *paths, *words]) == 0
    found = last(capsys)
    assert found["table"]["sample_batch_tokens"] == [4, 8]
    assert json.loads(Path(found["file"]).read_text()) == found["table"]
    modes = [x.environment_dict()["SGLANG_RAGGED_VERIFY_MODE"] for x in started.launches]
    assert modes == ["static", "compact"]
    checked = started.launches[1].argument_dict()
    assert checked["speculative_dspark_sps_table_path"] == found["file"]


def test_temperatures_are_collected_fitted_and_served(
    paths: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from splitserve import serving_sweeps

    started = Started(monkeypatch, FakeServer())

    def fit(stem: Path, out: Path, num_drafts: int) -> list[float]:
        assert num_drafts == 3
        assert started.launches[0].environment_dict()["SGLANG_DSPARK_STS_COLLECT_PATH"] == str(stem)
        out.write_text("{}")
        return [1.0, 2.0, 3.0]

    monkeypatch.setattr(serving_sweeps, "fit_sts", fit)
    assert cli.main(["sweep", *paths, "what=sts", "input_tokens=9"]) == 0
    found = last(capsys)
    assert found["temperatures"] == [1.0, 2.0, 3.0]
    served = started.launches[1]
    assert served.argument_dict()["speculative_dspark_confidence_sts_path"] == found["file"]
    assert "SGLANG_DSPARK_STS_COLLECT_PATH" not in served.environment_dict()


def test_a_second_server_differs_as_told(paths: list[str]) -> None:
    options = MeasureOptions(
        profile="dspark_static",
        draft="d",
        env={"A": 1},
        against={"profile": "plain", "env": {"B": 2}},
    )
    other = second_side(options)
    assert (other.profile, other.draft, other.env) == ("plain", "", {"A": 1, "B": 2})
    with pytest.raises(ValueError, match=r"against\.profil"):
        second_side(MeasureOptions(against={"profil": "plain"}))


def test_own_arguments_come_last(paths: list[str]) -> None:
    target = paths[0].partition("=")[2]
    options = MeasureOptions(
        target=target, gpu="hopper", args={"max_running_requests": 9, "disable_radix_cache": False}
    )
    arguments = measuring_launch(options, longest=100).argument_dict()
    assert arguments["max_running_requests"] == 9
    assert arguments["disable_radix_cache"] is False
    assert graph_sizes(1) == [1] and graph_sizes(6) == [1, 2, 4, 6]
