"""Checkpoints of the draft half: DeepSpeed's state in a folder that appears whole or not at all."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

STATE_TAG = "state"
META_NAME = "meta.json"


def checkpoint_name(step: int) -> str:
    """The folder's name for `step` finished optimizer steps."""
    return f"step_{step:06d}"


def list_checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    # Others of that beginning are not ours, such as a copy that somebody has put aside.
    ours = [p for p in folder.glob("step_*") if p.name.removeprefix("step_").isdecimal()]
    found = [p for p in ours if (p / META_NAME).is_file()]
    return sorted(found, key=lambda p: int(p.name.removeprefix("step_")))


def read_meta(checkpoint: Path) -> dict[str, Any]:
    """What a checkpoint says of itself: `step`, `world_size`, `zero_stage`, `draft`.

    Raises:
        ValueError: the folder is not a complete checkpoint.
    """
    try:
        meta: dict[str, Any] = json.loads((checkpoint / META_NAME).read_text())
        for name in ("step", "world_size"):
            if not isinstance(meta[name], int):
                raise TypeError(f"{name}={meta[name]!r} in its {META_NAME} is no number")
        return meta
    except KeyError as error:
        raise ValueError(
            f"checkpoint {checkpoint}: not complete (no {error} in its {META_NAME}); name another "
            "one with checkpoint=STEP or start anew without resume=true"
        ) from error
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(
            f"checkpoint {checkpoint}: not complete ({error}); name another one with "
            "checkpoint=STEP or start anew without resume=true"
        ) from error


def _all_ranks_succeeded(error: OSError | None) -> OSError | None:
    """The first error of any rank, so that all ranks take the same way out."""
    gathered: list[OSError | None] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, error)
    return next((e for e in gathered if e is not None), None)


def save_checkpoint(
    engine: Any,
    folder: Path,
    step: int,
    meta: dict[str, Any],
    write_draft: Callable[[Path], None],
    keep: int,
) -> Path:
    """Write everything that training goes on from; collective over all ranks.

    The folder is filled under another name and renamed once every rank has written its part, so
    that a crash or a full disk leaves the earlier checkpoints as they were.

    Args:
        write_draft: writes the exportable draft into the folder given; called on rank 0.
        keep: complete checkpoints to keep, this one included.

    Raises:
        ValueError: the disk is full or not writable; nothing of the attempt is left.
    """
    final = folder / checkpoint_name(step)
    partial = folder / f".{final.name}.partial"
    is_first = dist.get_rank() == 0
    error: OSError | None = None
    if is_first:
        try:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
        except OSError as caught:
            error = caught
    error = _all_ranks_succeeded(error)
    if error is None:
        error = _all_ranks_succeeded(_write_parts(engine, partial, meta, write_draft, step))
    if error is None and is_first:
        try:
            # Only now: while a rank still writes, names below the folder come and go.
            _sync_folder(partial)
            if final.exists():
                shutil.rmtree(final)
            os.rename(partial, final)
            for old in list_checkpoints(folder)[:-keep]:
                shutil.rmtree(old, ignore_errors=True)
        except OSError as caught:
            error = caught
    error = _all_ranks_succeeded(error)
    if error is not None:
        if is_first:
            shutil.rmtree(partial, ignore_errors=True)
        kept = list_checkpoints(folder)
        last = f"the last complete one is {kept[-1]}" if kept else "there is no earlier one"
        raise ValueError(
            f"checkpoint {final}: could not be written ({error}); {last}. Free space or set "
            "run_dir to another disk, then go on with resume=true"
        )
    return final


def _write_parts(
    engine: Any, partial: Path, meta: dict[str, Any], write_draft: Callable[[Path], None], step: int
) -> OSError | None:
    error: OSError | None = None
    try:
        engine.save_checkpoint(str(partial), tag=STATE_TAG, save_latest=False)
        if dist.get_rank() == 0:
            write_draft(partial / "draft")
            text = json.dumps({"step": step, "world_size": dist.get_world_size(), **meta}, indent=1)
            (partial / META_NAME).write_text(text)
    except OSError as caught:
        error = caught
    except RuntimeError as caught:  # torch's writer reports a full disk so
        error = OSError(str(caught))
    return error


def load_checkpoint(engine: Any, checkpoint: Path, meta: dict[str, Any]) -> int:
    """Restore weights, fp32 masters and optimizer moments; the number of finished steps.

    Raises:
        ValueError: the checkpoint was written by another number of ranks, at another ZeRO stage
            or for another draft.
    """
    stored = read_meta(checkpoint)
    wanted = {"world_size": dist.get_world_size(), **meta}
    for name, value in wanted.items():
        if stored.get(name) != value:
            raise ValueError(
                f"resume: {checkpoint} was written with {name}={stored.get(name)!r}, this run has "
                f"{value!r}; set it back, or start a new run without resume=true"
            )
    path, _ = engine.load_checkpoint(str(checkpoint), tag=STATE_TAG)
    if path is None:
        raise ValueError(
            f"resume: DeepSpeed could not read {checkpoint}; see the rank's log, or remove that "
            "folder to resume from the checkpoint before it"
        )
    return int(stored["step"])


def _sync_folder(folder: Path) -> None:
    """Flush a folder's files to the disk, so that a rename after it is not seen before them."""
    for path in folder.rglob("*"):
        if path.is_file():
            with open(path, "rb") as file:
                os.fsync(file.fileno())


def gather_draft_state(draft: torch.nn.Module, *, keep: bool) -> dict[str, torch.Tensor]:
    """Copies of the draft's weights as they are now, on its device; collective over all ranks.

    The half-precision weights are the same on every rank and are what is served. The confidence
    head is served in float32, so its weights come from the optimizer's masters.

    Args:
        keep: False only takes part and gives nothing.
    """
    from deepspeed.utils import safe_get_full_fp32_param

    state = {}
    for name, parameter in draft.named_parameters():
        value = parameter.detach()
        if name.startswith("confidence_head."):
            master = safe_get_full_fp32_param(parameter)
            value = value if master is None else master.view_as(parameter)
        if keep:
            state[name] = value.clone()
    return state
