"""What a checkpoint asks of the settings that go on from it, before a process is started."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from splitserve.errors import UserError
from splitserve.run.folder import RunFolder
from splitserve.run.main import check_checkpoint
from splitserve.settings import (
    DataSettings,
    LayoutSettings,
    RunSettings,
    TargetSettings,
    TrainSettings,
)


def resumed(num_ranks: int, steps: int) -> RunSettings:
    return RunSettings(
        resume=True,
        target=TargetSettings(path="target"),
        data=DataSettings(prompts="prompts.jsonl"),
        train=TrainSettings(steps=steps),
        layout=LayoutSettings(train_ranks=num_ranks),
    )


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    found = RunFolder(tmp_path)
    checkpoint = found.checkpoints / "step_000003"
    checkpoint.mkdir(parents=True)
    (checkpoint / "meta.json").write_text(json.dumps({"step": 3, "world_size": 2}))
    return found


@pytest.mark.parametrize(
    ("num_ranks", "steps", "field", "allowed"),
    [(1, 9, "layout.train_ranks", "2 ranks"), (2, 2, "train.steps", "3 or more")],
)
def test_settings_that_do_not_fit_the_checkpoint_are_refused(
    folder: RunFolder, num_ranks: int, steps: int, field: str, allowed: str
) -> None:
    with pytest.raises(UserError, match=allowed) as caught:
        check_checkpoint(resumed(num_ranks, steps), folder)
    assert caught.value.field == field and "step_000003" in str(caught.value)


def test_settings_that_fit_go_on(folder: RunFolder, tmp_path: Path) -> None:
    check_checkpoint(resumed(2, 3), folder)
    check_checkpoint(replace(resumed(1, 1), resume=False), folder)
    check_checkpoint(resumed(1, 1), RunFolder(tmp_path / "before the first checkpoint"))


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"step": 3}', '{"step": "3", "world_size": 2}'])
def test_a_damaged_checkpoint_says_what_to_do(folder: RunFolder, text: str) -> None:
    (folder.checkpoints / "step_000003" / "meta.json").write_text(text)
    with pytest.raises(ValueError, match=r"step_000003: not complete.*checkpoint=STEP"):
        check_checkpoint(resumed(2, 9), folder)


def test_a_copy_put_aside_is_no_checkpoint(folder: RunFolder) -> None:
    last = folder.last_checkpoint()
    assert last is not None
    shutil.copytree(last, folder.checkpoints / "step_000003.bak")
    assert folder.last_checkpoint() == last
