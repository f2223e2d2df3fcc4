"""The run folder: one process at a time, and nothing lost to a crash."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from splitserve.errors import UserError
from splitserve.messages import Sampling
from splitserve.run.folder import RunFolder, newest_run, read_json_lines


def refusal(run_dir: Path | str, *, resume: bool) -> str:
    with pytest.raises(UserError) as caught:
        RunFolder.create(str(run_dir), "recipe", resume=resume)
    assert caught.value.field == "run_dir"
    return str(caught.value)


def test_a_new_run_gets_a_folder_of_its_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = RunFolder.create("", "recipe", resume=False)
    assert folder.path.parent == Path("runs/recipe")
    for sub in (folder.logs, folder.checkpoints, folder.snapshots):
        assert sub.is_dir()
    assert not folder.config.exists()


def test_a_folder_with_a_run_is_not_begun_anew(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("seed: 0\n")
    assert "resume=true" in refusal(tmp_path, resume=False)
    assert RunFolder.create(str(tmp_path), "recipe", resume=True).path == tmp_path


def test_nothing_to_resume_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert "run_dir=FOLDER" in refusal(tmp_path / "none", resume=True)
    assert "runs/recipe" in refusal("", resume=True)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    refusal(tmp_path / "file" / "run", resume=False)


def test_a_second_run_in_the_same_folder_is_refused(tmp_path: Path) -> None:
    first = RunFolder.create(str(tmp_path), "recipe", resume=False)
    assert "no other process" in refusal(tmp_path, resume=False)
    del first
    RunFolder.create(str(tmp_path), "recipe", resume=False)


def test_the_lock_goes_with_the_process_that_held_it(tmp_path: Path) -> None:
    code = (
        "import os, sys\n"
        "from splitserve.run.folder import RunFolder\n"
        f"folder = RunFolder.create({str(tmp_path)!r}, 'recipe', resume=False)\n"
        "print('locked', flush=True)\n"
        "sys.stdin.read()\n"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "locked\n"
        refusal(tmp_path, resume=False)
    finally:
        holder.kill()
        holder.communicate()
    RunFolder.create(str(tmp_path), "recipe", resume=False)


def test_the_newest_run_is_the_one_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    # The name says when a run began; what counts is which one exists as a run, and when.
    for age, name in enumerate(("b", "a", "c")):
        run = tmp_path / "runs" / "recipe" / name
        run.mkdir(parents=True)
        (run / "config.yaml").write_text("seed: 0\n")
        os.utime(run / "config.yaml", (1000 - age, 1000 - age))
    (tmp_path / "runs" / "recipe" / "d").mkdir()
    assert newest_run(tmp_path / "runs" / "recipe").name == "b"
    assert RunFolder.create("", "recipe", resume=True).path.name == "b"


def test_responses_are_read_back(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    assert folder.read_responses() == {}
    folder.write_response("p/0", (1, 2, 3), (4, 5), "stop", Sampling(temperature=0.8, top_k=5))
    folder.write_response("p/1", (1, 2), (6,), "length", Sampling())
    rows = folder.read_responses()
    assert list(rows) == ["p/0", "p/1"]
    assert rows["p/0"]["num_prompt_tokens"] == 3
    assert rows["p/0"]["output_ids"] == [4, 5]
    assert rows["p/0"]["finish_reason"] == "stop"
    assert rows["p/0"]["temperature"] == 0.8
    assert rows["p/0"]["top_k"] == 5


@pytest.mark.parametrize("cut", range(1, 40, 6))
def test_a_response_that_a_crash_has_cut_off_is_left_out(tmp_path: Path, cut: int) -> None:
    folder = RunFolder(tmp_path)
    for k in range(3):
        folder.write_response(f"p/{k}", (1,), (4, 5), "stop", Sampling())
    folder.responses.write_bytes(folder.responses.read_bytes()[:-1][:-cut])
    assert list(folder.read_responses()) == ["p/0", "p/1"]


def test_what_is_written_after_a_crash_is_read_too(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.write_response("p/0", (1,), (4, 5), "stop", Sampling())
    folder.write_response("p/1", (1,), (4, 5), "stop", Sampling())
    folder.responses.write_bytes(folder.responses.read_bytes()[:-9])
    folder.write_response("p/2", (1,), (4, 5), "stop", Sampling())
    folder.write_response("p/3", (1,), (4, 5), "stop", Sampling())
    assert list(folder.read_responses()) == ["p/0", "p/2", "p/3"]


def test_metrics_and_evaluations_are_lines(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.write_metrics("step", 10, {"loss": 1.5})
    folder.write_eval(0, {"full": False, "reports": []})
    (row,) = read_json_lines(folder.metrics)
    assert (row["kind"], row["step"], row["loss"]) == ("step", 10, 1.5)
    assert row["time"] > 0
    assert folder.read_evals() == [{"step": 0, "report": {"full": False, "reports": []}}]


def test_a_file_that_cannot_be_written_says_what_to_do(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.metrics.mkdir()
    with pytest.raises(UserError, match="resume=true"):
        folder.write_metrics("step", 0, {})
