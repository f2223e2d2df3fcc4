"""What the benchmarks take from runs, also from those that were stopped or went on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import several_runs
from benchmarks.gpu_loop import pace_figures
from splitserve.compose import compose, to_yaml


def write_run(folder: Path, starts: list[float]) -> Path:
    """A stopped run that logged ten intervals of ten steps from each of the starts on."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(to_yaml(compose(["recipe=smollm2_dspark"])))
    rows: list[dict[str, Any]] = []
    for place, start in enumerate(starts):
        for number in range(1, 11):
            rows.append(
                {
                    "kind": "train",
                    "step": 100 * place + 10 * number,
                    "elapsed_seconds": start + 20.0 * number,
                    "trainer_wait_fraction": 0.9 if number < 3 else 0.1,
                    "engine_idle_fraction": 0.0,
                    "ring_fill": 0.5,
                    "target_tokens_per_second": 100.0,
                    "answers_per_second": 2.0,
                    "rank_0_tflop_per_s": 100.0,
                    "trainer_peak_memory_gb": 1.0,
                    "gpu_0_used_gb": 10.0 + number,
                }
            )
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "evals.jsonl").write_text("")
    return folder


@pytest.mark.parametrize("starts", [[30.0], [30.0, 5.0]])
def test_the_pace_leaves_the_start_out_and_a_resumed_run_counts_once(
    starts: list[float], tmp_path: Path
) -> None:
    batch = compose(["recipe=smollm2_dspark"]).train.global_batch_size
    figures = pace_figures(write_run(tmp_path / "run", starts))
    assert figures["samples_per_second"] == pytest.approx(batch * 0.5)
    assert figures["trainer_wait_fraction"] == pytest.approx(0.1)
    assert figures["gpu_0_used_gb"] == 20.0
    assert "hot_update_seconds" not in figures


def test_runs_come_into_one_record_under_their_labels(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(tmp_path / "lr=1e-3", [0.0])
    options = ["two", "--runs", f"={run}", f"8b={run}", "--out", str(tmp_path)]
    assert several_runs.main(options) == 0
    figures = json.loads((tmp_path / "two.json").read_text())["figures"]
    assert figures["8b_samples_per_second"] == figures["samples_per_second"] > 0
    with pytest.raises(SystemExit):
        several_runs.main(["two", "--runs", str(tmp_path), "--out", str(tmp_path)])
    assert "write =FOLDER for no label" in capsys.readouterr().err
    given = ["--like", str(tmp_path / "two.json"), "--out", str(tmp_path / "more")]
    for runs, message in (
        ([f"a={run}", f"a={run}"], "the label 'a' is there twice"),
        (["a=missing"], "missing has no config.yaml"),
        ([f"={run}", "--add", str(tmp_path / "two.json")], "give the run a label of its own"),
        ([f"a={run}", "--add", str(run / "config.yaml")], "a record that a benchmark has written"),
    ):
        with pytest.raises(SystemExit):
            several_runs.main(["three", *given, "--runs", *runs])
        assert message in capsys.readouterr().err
    assert not (tmp_path / "more").exists()


def test_the_share_of_the_machine_s_rate_needs_that_rate(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [0.0])
    assert several_runs.main(["one", "--runs", f"={run}", "--out", str(tmp_path)]) == 0
    first = tmp_path / "one.json"
    record = json.loads(first.read_text())
    assert record["figures"]["rank_0_tflop_per_s"] == 100.0 and "mfu" not in record["figures"]
    record["figures"] = {"matmul_tflops": 800.0}
    first.write_text(json.dumps(record))
    options = ["two", "--runs", f"={run}", "--like", str(first), "--out", str(tmp_path)]
    assert several_runs.main(options) == 0
    assert json.loads((tmp_path / "two.json").read_text())["figures"]["mfu"] == 0.125
