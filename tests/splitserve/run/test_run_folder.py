"""The run folder: one process at a time, and nothing lost to a crash."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from splitserve.errors import UserError
from splitserve.messages import Sampling
from splitserve.run.folder import RunFolder, newest_run, read_json_lines, write_whole
from splitserve.run.main import best_so_far

REPORT = {"full": False, "reports": [{"domains": {"all": {"accept_length": 1.5, "alpha": []}}}]}


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
    folder.write_eval(0, REPORT)
    (row,) = read_json_lines(folder.metrics)
    assert (row["kind"], row["step"], row["loss"]) == ("step", 10, 1.5)
    assert row["time"] > 0
    assert folder.read_evals() == [{"step": 0, "report": REPORT}]


@pytest.mark.parametrize("left", [b"", b"{", b'{"step": 7, "rep', b"\0\0\0", b'\xff{"step"'])
def test_an_evaluation_that_a_crash_has_cut_off_is_left_out(tmp_path: Path, left: bytes) -> None:
    folder = RunFolder(tmp_path)
    folder.write_eval(0, REPORT)
    with open(folder.evals, "ab") as file:
        file.write(left)
    assert [row["step"] for row in folder.read_evals()] == [0]
    folder.write_eval(5, REPORT)
    assert [row["step"] for row in folder.read_evals()] == [0, 5]


def test_a_line_that_lacks_only_its_end_is_kept(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.write_eval(0, REPORT)
    folder.evals.write_bytes(folder.evals.read_bytes()[:-1])
    assert [row["step"] for row in folder.read_evals()] == [0]
    folder.write_eval(5, REPORT)
    assert [row["step"] for row in folder.read_evals()] == [0, 5]


def test_a_long_rest_is_removed_whole(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.write_eval(0, REPORT)
    with open(folder.evals, "ab") as file:
        file.write(b'{"step": 1, "report": "' + b"x" * 300_000)
    folder.write_eval(5, REPORT)
    assert folder.evals.read_bytes().count(b"\n") == 2
    assert [row["step"] for row in folder.read_evals()] == [0, 5]


@pytest.mark.parametrize(
    "damaged",
    [
        '{"step": 5, "rep',
        "[]",
        "{}",
        '{"step": 5}',
        '{"step": 5, "report": {}}',
        '{"step": 5, "report": {"reports": []}}',
        '{"step": 5, "report": {"reports": [{"domains": {}}]}}',
        '{"step": 5, "report": {"reports": [{"domains": {"all": {"alpha": []}}}]}}',
        '{"step": "5", "report": {"reports": [{"domains": {"all": {"accept_length": 1.5}}}]}}',
        '{"step": 5, "report": {"reports": [{"domains": {"all": {"accept_length": null}}}]}}',
    ],
)
def test_a_damaged_evaluation_is_named_by_file_and_line(tmp_path: Path, damaged: str) -> None:
    folder = RunFolder(tmp_path)
    folder.write_eval(0, REPORT)
    with open(folder.evals, "a") as file:
        file.write(damaged + "\n")
    folder.write_eval(9, REPORT)
    (tmp_path / "snapshots" / "step_000000").mkdir(parents=True)
    for read in (folder.read_evals, lambda: best_so_far(folder)):
        with pytest.raises(UserError, match=r"evals\.jsonl, line 2.*remove that line"):
            read()


@pytest.mark.parametrize(
    "damaged", ['{"sample_id": "p/5", "num_pro', "7", '{"sample_id": "p/5", "output_ids": [1]}']
)
def test_a_damaged_response_is_named_by_file_and_line(tmp_path: Path, damaged: str) -> None:
    folder = RunFolder(tmp_path)
    folder.responses.write_text(damaged + "\n")
    folder.write_response("p/1", (1, 2), (6,), "length", Sampling())
    with pytest.raises(UserError, match=r"responses\.jsonl, line 1.*remove that line"):
        folder.read_responses()


def test_a_damaged_line_of_metrics_is_named(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.metrics.write_text('{"kind": "step"\n')
    with pytest.raises(UserError, match=r"metrics\.jsonl, line 1"):
        list(read_json_lines(folder.metrics))


@pytest.mark.parametrize("text", ["", '{"dig', "{}", "[]"])
def test_a_damaged_digest_says_what_to_do(tmp_path: Path, text: str) -> None:
    folder = RunFolder(tmp_path)
    folder.keep_digest("abc")
    folder.keep_digest("abc")
    folder.samples.write_text(text)
    with pytest.raises(UserError, match=r"samples\.json.*remove it"):
        folder.keep_digest("abc")


def test_a_file_written_whole_leaves_the_old_one_where_the_disk_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "config.yaml"
    write_whole(path, "seed: 0\n")

    def full(_descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UserError, match="free space"):
        write_whole(path, "seed: 1\n")
    assert path.read_text() == "seed: 0\n"


def test_a_file_that_cannot_be_written_says_what_to_do(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.metrics.mkdir()
    with pytest.raises(UserError, match="resume=true"):
        folder.write_metrics("step", 0, {})
