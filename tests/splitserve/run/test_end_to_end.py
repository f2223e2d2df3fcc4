"""Whole runs as a user starts them, on a tiny target: results, resuming, and deaths."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from run_testing import Run
from safetensors.torch import load_file

from dspark.checkpoint import load_draft, verify_export
from splitserve.cli import main

Start = Callable[..., Run]


def weights(run: Run, step: int) -> dict[str, torch.Tensor]:
    """The draft in the checkpoint of a step; float32 weights are exported as bfloat16."""
    return load_file(run.folder / "checkpoints" / f"step_{step:06d}" / "draft/model.safetensors")


def masters(run: Run, step: int) -> torch.Tensor:
    """The float32 weights of a checkpoint's single rank or ranks, in order."""
    folder = run.folder / "checkpoints" / f"step_{step:06d}" / "state"
    state = torch.load(folder / "mp_rank_00_model_states.pt", weights_only=False)
    return torch.cat([t.flatten().float() for _, t in sorted(state["module"].items())])


def metrics(run: Run, kind: str) -> list[dict]:
    rows = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if row["kind"] == kind]


def wait_until_gone(pids: dict[str, int], seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        left = {name: pid for name, pid in pids.items() if Path(f"/proc/{pid}").exists()}
        left = {n: p for n, p in left.items() if "Z (" not in status(p) and status(p)}
        if not left:
            return
        time.sleep(0.1)
    pytest.fail(f"still alive after {seconds} s: {left}")


def status(pid: int) -> str:
    try:
        return next(
            line
            for line in Path(f"/proc/{pid}/status").read_text().splitlines()
            if line.startswith("State")
        ).replace("State:\t", "")
    except (OSError, StopIteration):
        return ""


@pytest.fixture(scope="module")
def finished(tiny_recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """One run of four steps on two ranks and two engines, to its end."""
    folder = tmp_path_factory.mktemp("runs") / "whole"
    run = Run(tiny_recipe, folder, ["layout.train_ranks=2", "layout.engines=2"])
    code, output = run.end()
    assert code == 0, output
    run.output = output
    yield run
    run.kill()


def test_a_run_leaves_what_it_promises(finished: Run) -> None:
    config = verify_export(finished.folder / "export")
    assert config.block_size == 3
    assert {p.name for p in (finished.folder / "checkpoints").iterdir()} == {
        "step_000002",
        "step_000004",
    }
    assert [row["step"] for row in metrics(finished, "train")] == [1, 2, 3, 4]
    assert all(row["rank_0_tflop_per_s"] > 0 for row in metrics(finished, "train"))
    assert [row["step"] for row in metrics(finished, "eval")] == [0, 2, 4]
    assert len(metrics(finished, "finished")) == 1
    logs = {p.stem for p in (finished.folder / "logs").iterdir()}
    assert {"engine-0", "engine-1", "evaluator", "trainer-0", "trainer-1"} <= logs
    assert len(metrics(finished, "engine_ready")) == 2
    responses = (finished.folder / "responses.jsonl").read_text().splitlines()
    names = [json.loads(line)["sample_id"] for line in responses]
    assert len(names) == len(set(names)) == 16, "4 steps of 4 samples, each answered once"
    assert not list(finished.folder.rglob("*.partial"))


def test_the_closing_table_says_what_came_out(finished: Run) -> None:
    for text in (
        "accept length",
        "sums",
        "words",
        "export:",
        "sglang.launch_server",
        "DSPARK",
        "serve profile=",
    ):
        assert text in finished.output, f"{text!r} is missing in\n{finished.output}"


def test_evaluation_counts_add_up(finished: Run) -> None:
    for row in (finished.folder / "evals.jsonl").read_text().splitlines():
        for report in json.loads(row)["report"]["reports"]:
            every = report["domains"]["all"]
            parts = [d for name, d in report["domains"].items() if name != "all"]
            assert every["num_tokens"] == sum(d["num_tokens"] for d in parts)
            assert sum(every["histogram"]) == every["num_rounds"]
            assert every["accept_length"] >= 1.0


def test_eval_and_export_work_on_the_run_folder(
    finished: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["eval", f"run={finished.folder}", "num_prompts=3"]) == 0
    assert "accept length" in capsys.readouterr().out
    assert main(["eval", f"run={finished.folder}", "lossless=true", "num_prompts=4"]) == 0
    assert "lossless: 4" in capsys.readouterr().out
    out = tmp_path / "out"
    assert main(["export", f"run={finished.folder}", "checkpoint=2", f"out={out}"]) == 0
    verify_export(out)
    assert main(["export", f"run={finished.folder}", "checkpoint=4", f"out={out}"]) == 0
    assert main(["export", f"run={finished.folder}", "checkpoint=3", f"out={out}"]) == 2
    assert "2, 4" in capsys.readouterr().err


def test_an_export_replaces_an_export_and_nothing_else(
    finished: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    thesis = tmp_path / "mine" / "thesis.txt"
    thesis.parent.mkdir()
    thesis.write_text("years of work")
    for out in (thesis.parent, finished.folder):
        assert main(["export", f"run={finished.folder}", f"out={out}"]) == 2
        assert f"out='{out}' is not usable" in capsys.readouterr().err
    assert thesis.read_text() == "years of work"
    assert finished.folder.joinpath("config.yaml").exists()


def test_a_reloaded_export_gives_the_same_outputs(finished: Run) -> None:
    first, second = (load_draft(finished.folder / "export") for _ in range(2))
    config = first.config
    states = torch.randn(1, 5, config.num_context_features).bfloat16()
    positions = torch.arange(5).unsqueeze(0)
    blocks = torch.randn(1, 1, config.block_size, config.hidden_size).bfloat16()
    outputs = [
        draft.forward_blocks(
            blocks,
            torch.tensor([[5]]),
            draft.context_kv(states, positions),
            torch.ones(1, 1, 5, dtype=torch.bool),
        )
        for draft in (first, second)
    ]
    assert torch.equal(*outputs)


ROWS = ("train.row_tokens=96", "train.micro_batch_size=3")


def test_rank_counts_and_rows_agree_on_the_update(start_run: Start) -> None:
    """1 rank, 3 with uneven shares, and 2 with sequences packed into rows: the same weights to
    rounding, though the micro-batches of a step differ."""
    found = {}
    for name, ranks, options in (
        ("reference", 1, ()),
        ("ranks3", 3, ()),
        ("rows2", 2, ROWS),
    ):
        run = start_run(
            name, f"layout.train_ranks={ranks}", "train.steps=2", "eval.every=0", *options
        )
        code, output = run.end()
        assert code == 0, output
        found[name] = masters(run, 2), metrics(run, "train")
    reference, rows = found.pop("reference")
    for name, (other, other_rows) in found.items():
        # Adam's first steps have the size of the learning rate whatever the gradient: rounding
        # shows where a gradient is nearly zero, so the bound is on the root mean square.
        error = (other - reference).square().mean().sqrt()
        assert error < 1e-5, f"{name}: {error}"
        for mine, theirs in zip(rows, other_rows, strict=True):
            assert theirs["loss"] == pytest.approx(mine["loss"], rel=1e-5)
            assert theirs["grad_norm"] == pytest.approx(mine["grad_norm"], rel=1e-4)
            assert theirs["num_blocks"] == mine["num_blocks"]


def test_stopped_and_resumed_is_bit_equal_to_uninterrupted(start_run: Start) -> None:
    """Ctrl-C at an arbitrary step, then resume: weights, moments and rates as if nothing was."""
    whole = start_run("whole", "train.steps=8", "train.save_every=8", "eval.every=0")
    code, output = whole.end()
    assert code == 0, output
    cut = start_run("cut", "train.steps=8", "train.save_every=100", "eval.every=0")
    cut.wait_for('"kind": "train", "step": 3')
    children = cut.children()
    assert {"evaluator", "trainer-0"} <= set(children)
    asked = time.monotonic()
    cut.process.send_signal(signal.SIGINT)
    code, output = cut.end()
    assert code == 130, output
    assert time.monotonic() - asked < 10.0
    assert "resume=true" in output
    wait_until_gone(children)
    resumed = Run(
        next(cut.folder.parent.parent.glob("recipe*/tiny.yaml"), whole_recipe(cut)),
        cut.folder,
        ["resume=true"],
    )
    code, output = resumed.end()
    assert code == 0, output
    assert torch.equal(masters(cut, 8), masters(whole, 8))
    rates = {row["step"]: row["learning_rate"] for row in metrics(cut, "train")}
    assert rates == {row["step"]: row["learning_rate"] for row in metrics(whole, "train")}


def whole_recipe(run: Run) -> Path:
    return Path(
        next(a for a in run.process.args if a.startswith("recipe=")).removeprefix("recipe=")
    )


def test_early_stop_ends_training_and_measures_what_there_is(start_run: Start) -> None:
    """With steps too small to move a weight no draft beats the first one."""
    run = start_run(
        "early", "train.steps=400", "eval.every=3", "eval.early_stop=1", "train.learning_rate=1e-30"
    )
    code, output = run.end()
    assert code == 0, output
    (finished,) = metrics(run, "finished")
    assert finished["step"] < 400 and finished["best_step"] == 0
    assert metrics(run, "eval")[-1]["step"] == finished["step"], "the last draft was not measured"
    assert (run.folder / "checkpoints" / f"step_{finished['step']:06d}").is_dir()


def test_a_killed_engine_is_replaced_and_nothing_is_lost(start_run: Start) -> None:
    run = start_run("engine", "train.steps=8", "engine.max_in_flight=1")
    run.wait_for("sample_id", "responses.jsonl")
    os.kill(run.children()["engine"], signal.SIGKILL)
    code, output = run.end()
    assert code == 0, output
    assert [row["role"] for row in metrics(run, "restart")] == ["engine"]
    assert not metrics(run, "finished")[0].get("dropped")


def test_a_killed_evaluator_is_replaced(start_run: Start) -> None:
    run = start_run("evaluator")
    run.wait_for('"kind": "eval", "step": 0')
    os.kill(run.children()["evaluator"], signal.SIGKILL)
    code, output = run.end()
    assert code == 0, output
    assert [row["step"] for row in metrics(run, "eval")] == [0, 2, 4]


def test_a_killed_trainer_ends_the_run_with_a_way_on(start_run: Start) -> None:
    run = start_run("trainer", "layout.train_ranks=2", "train.steps=400", "train.save_every=2")
    run.wait_for('"kind": "checkpoint", "step": 2')
    children = run.children()
    os.kill(children["trainer-1"], signal.SIGKILL)
    code, output = run.end()
    assert code == 1, output
    assert "trainer" in output and "resume=true" in output
    wait_until_gone(children)


def test_a_stopped_worker_is_noticed(start_run: Start) -> None:
    """SIGSTOP: alive but silent. The wait is bounded and the message names the worker."""
    run = start_run(
        "stopped", "train.steps=400", "layout.heartbeat_timeout_seconds=8", "train.save_every=2"
    )
    run.wait_for('"kind": "checkpoint", "step": 2')
    children = run.children()
    os.kill(children["trainer-0"], signal.SIGSTOP)
    code, output = run.end(60.0)
    assert code == 1, output
    assert "silent" in output and "trainer-0" in output
    wait_until_gone(children)


def test_nothing_outlives_a_killed_coordinator(start_run: Start) -> None:
    run = start_run("orphans", "train.steps=400")
    run.wait_for('"kind": "train", "step": 1')
    children = run.children()
    assert {"engine", "evaluator", "trainer-0"} & set(children)
    run.kill()
    wait_until_gone(children)
