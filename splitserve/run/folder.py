"""The run folder: everything that a run leaves behind, each thing under one name."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from splitserve.errors import UserError
from splitserve.messages import Sampling
from splitserve.train.checkpoint import list_checkpoints

CONFIG_NAME = "config.yaml"
METRICS_NAME = "metrics.jsonl"
RESPONSES_NAME = "responses.jsonl"
EVALS_NAME = "evals.jsonl"


class RunFolder:
    """Paths of a run and the append-only files in it.

    ```
    config.yaml       the resolved settings
    samples.json      a digest of what is trained on
    metrics.jsonl     one line per log interval, evaluation and event
    responses.jsonl   what the target answered, once per sample
    evals.jsonl       every accept report
    logs/             one file per process
    checkpoints/      what training goes on from
    snapshots/        drafts waiting for the evaluator, and the best one
    export/           the best draft as an HF folder
    ```
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / CONFIG_NAME
        self.samples = path / "samples.json"
        self.metrics = path / METRICS_NAME
        self.responses = path / RESPONSES_NAME
        self.evals = path / EVALS_NAME
        self.logs = path / "logs"
        self.checkpoints = path / "checkpoints"
        self.snapshots = path / "snapshots"
        self.export = path / "export"
        self._lock: Any = None
        self._made: list[Path] = []
        """Folders that were not there before, the innermost first."""

    @classmethod
    def create(cls, run_dir: str, recipe: str, *, resume: bool) -> RunFolder:
        """Open the folder of a new or of a resumed run and take its lock.

        Without `run_dir` a new run gets `runs/RECIPE/TIME`, and a resumed one the newest folder
        there.

        Raises:
            UserError: nothing to resume, the folder already holds a run, or another process
                works in it.
        """
        if run_dir:
            path = Path(run_dir)
        elif resume:
            path = newest_run(Path("runs") / recipe)
        else:
            path = Path("runs") / recipe / time.strftime("%Y%m%d-%H%M%S")
        folder = cls(path)
        folder._made = [p for p in (path, *path.parents) if not p.exists()]
        if resume and not folder.config.is_file():
            raise UserError(
                "run_dir",
                str(path),
                "a folder of an earlier run when resume=true",
                "name the run with run_dir=FOLDER, or leave resume=true out to start anew",
            )
        if not resume and folder.config.exists():
            raise UserError(
                "run_dir",
                str(path),
                "a folder without a run in it",
                "add resume=true to go on with that run, or name another folder",
            )
        try:
            for sub in (folder.logs, folder.checkpoints, folder.snapshots):
                sub.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(
                "run_dir", str(path), "a folder that can be written", f"{error.strerror}"
            ) from error
        folder._take_lock()
        return folder

    def _take_lock(self) -> None:
        self._lock = open(self.path / ".lock", "w")  # noqa: SIM115 - held for the run's life
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise UserError(
                "run_dir",
                str(self.path),
                "a folder that no other process works in",
                "wait for the other run, stop it, or name another folder",
            ) from error

    def discard(self) -> None:
        """Remove what `create` has made, where no run has begun in it; for a run that is refused.

        What holds anything else stays.
        """
        if self.config.exists():
            return
        (self.path / ".lock").unlink(missing_ok=True)
        for path in (self.logs, self.checkpoints, self.snapshots, *self._made):
            with contextlib.suppress(OSError):
                path.rmdir()

    def keep_digest(self, digest: str) -> None:
        """Write down what the run trains on; a resumed run must have the same.

        Raises:
            UserError: it was begun with other samples.
        """
        if not self.samples.exists():
            self.samples.write_text(json.dumps({"digest": digest}) + "\n")
            return
        found = json.loads(self.samples.read_text())["digest"]
        if found != digest:
            raise UserError(
                "data",
                digest,
                f"{found}, the digest of the samples that the run began with",
                "restore its prompts, conversations and tokenizer, or start a new run",
            )

    # --- append-only files -----------------------------------------------------------------------

    def write_metrics(self, kind: str, step: int, values: dict[str, Any]) -> None:
        """Append one line to the metrics file."""
        _append(self.metrics, {"time": time.time(), "kind": kind, "step": step, **values})

    def write_response(
        self,
        sample_id: str,
        prompt_ids: tuple[int, ...],
        output_ids: tuple[int, ...],
        finish: str,
        sampling: Sampling,
        draft_step: int = -1,
    ) -> None:
        """Keep a response: it was paid for once and a resumed run trains on the same one."""
        _append(
            self.responses,
            {
                "sample_id": sample_id,
                "num_prompt_tokens": len(prompt_ids),
                "output_ids": list(output_ids),
                "finish_reason": finish,
                "temperature": sampling.temperature,
                "top_p": sampling.top_p,
                "top_k": sampling.top_k,
                "draft_step": draft_step,
            },
        )

    def read_responses(self) -> dict[str, dict[str, Any]]:
        """Responses by sample id; a last line cut off by a crash is left out."""
        return {row["sample_id"]: row for row in read_json_lines(self.responses)}

    def write_eval(self, step: int, report: dict[str, Any]) -> None:
        """Append the reports of one evaluation."""
        _append(self.evals, {"step": step, "report": report})

    def read_evals(self) -> list[dict[str, Any]]:
        """Every evaluation so far, oldest first."""
        return list(read_json_lines(self.evals))

    def last_checkpoint(self) -> Path | None:
        """The newest complete checkpoint."""
        found = list_checkpoints(self.checkpoints)
        return found[-1] if found else None


def newest_run(parent: Path) -> Path:
    """The newest run folder below `parent`.

    Raises:
        UserError: there is none.
    """
    runs = [p.parent for p in parent.glob(f"*/{CONFIG_NAME}")]
    if not runs:
        raise UserError(
            "run_dir",
            "",
            f"a run folder, or nothing when {parent} holds one",
            "name the run with run_dir=FOLDER",
        )
    return max(runs, key=lambda p: (p / CONFIG_NAME).stat().st_mtime)


def _append(path: Path, row: dict[str, Any]) -> None:
    try:
        with open(path, "ab+") as file:
            # A line that a crash has cut off must not swallow the one that follows it.
            if file.tell():
                file.seek(-1, os.SEEK_END)
            torn = file.read(1) not in (b"\n", b"")
            file.write(b"\n" * torn + json.dumps(row).encode() + b"\n")
    except OSError as error:
        raise UserError(
            "run_dir",
            str(path),
            "a file that can be appended to",
            f"{os.strerror(error.errno or 0)}; free space, then go on with resume=true",
        ) from error


def read_json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a JSON-lines file; lines that a crash has cut off are passed over."""
    if not path.exists():
        return
    with open(path) as file:
        for line in file:
            try:
                yield json.loads(line)
            except json.JSONDecodeError:
                continue
