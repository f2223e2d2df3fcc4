"""The run folder: everything that a run leaves behind, each thing under one name."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

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
            write_whole(self.samples, json.dumps({"digest": digest}) + "\n")
            return
        found = self._kept_digest()
        if found != digest:
            raise UserError(
                "data",
                digest,
                f"{found}, the digest of the samples that the run began with",
                "restore its prompts, conversations and tokenizer, or start a new run",
            )

    def _kept_digest(self) -> str:
        try:
            return str(json.loads(self.samples.read_text())["digest"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(
                "run_dir",
                str(self.samples),
                "a file with the digest of the samples that the run began with",
                "remove it if its prompts, conversations and tokenizer are still the same",
            ) from error

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
        """Responses by sample id; a last line cut off by a crash is left out.

        Raises:
            UserError: another line is damaged.
        """
        return {row["sample_id"]: row for row in read_json_lines(self.responses, _is_response)}

    def write_eval(self, step: int, report: dict[str, Any]) -> None:
        """Append the reports of one evaluation."""
        _append(self.evals, {"step": step, "report": report})

    def read_evals(self) -> list[dict[str, Any]]:
        """Every evaluation so far, oldest first; a last line cut off by a crash is left out.

        Raises:
            UserError: another line is damaged.
        """
        return list(read_json_lines(self.evals, _is_eval))

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


def write_whole(path: Path, text: str) -> None:
    """Write a file of the run folder so that a crash leaves all of it or nothing.

    Raises:
        UserError: it cannot be written.
    """
    partial = path.with_name(f".{path.name}.partial")
    try:
        with open(partial, "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError as error:
        raise _unwritable(path, error) from error


def _append(path: Path, row: dict[str, Any]) -> None:
    try:
        with open(path, "ab+") as file:
            _end_last_line(file)
            file.write(json.dumps(row).encode() + b"\n")
    except OSError as error:
        raise _unwritable(path, error) from error


def _unwritable(path: Path, error: OSError) -> UserError:
    return UserError(
        "run_dir",
        str(path),
        "a file that can be written",
        f"{os.strerror(error.errno or 0)}; free space, then go on with resume=true",
    )


def _end_last_line(file: BinaryIO) -> None:
    """Remove what a crash has left of a last line, so that what follows is a line of its own."""
    size = end = file.seek(0, os.SEEK_END)
    tail = b""
    while end and b"\n" not in tail:
        begin = max(0, end - _BLOCK_BYTES)
        file.seek(begin)
        tail = file.read(end - begin) + tail
        end = begin
    last = tail[tail.rfind(b"\n") + 1 :]
    if not last:
        return
    if _parsed(last) is None:
        file.truncate(size - len(last))
    else:
        file.write(b"\n")


_BLOCK_BYTES = 2**16


def read_json_lines(
    path: Path, is_good: Callable[[dict[str, Any]], bool] = lambda row: True
) -> Iterator[dict[str, Any]]:
    """The objects of a JSON-lines file; a last line that a crash has cut off is left out.

    Args:
        is_good: whether an object has what its readers need.

    Raises:
        UserError: another line is no object, or not a good one.
    """
    if not path.exists():
        return
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            row = _parsed(line)
            if row is not None and is_good(row):
                yield row
            elif row is not None or line.endswith(b"\n"):
                raise UserError(
                    "run_dir",
                    f"{path}, line {number}",
                    "lines as the run has written them; this one is damaged",
                    "restore the file, or remove that line and lose what it says",
                )


def _parsed(line: bytes) -> dict[str, Any] | None:
    """The object in a line; None where there is no whole one."""
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None


def _is_response(row: dict[str, Any]) -> bool:
    ids = row.get("output_ids")
    return (
        isinstance(row.get("sample_id"), str)
        and isinstance(row.get("num_prompt_tokens"), int)
        and isinstance(ids, list)
        and all(isinstance(token, int) for token in ids)
        and isinstance(row.get("draft_step", -1), int)
    )


def _is_eval(row: dict[str, Any]) -> bool:
    """Whether it has a step, and an accept length for each domain of its first report."""
    try:
        domains = row["report"]["reports"][0]["domains"]
        lengths = [domains["all"]["accept_length"]]
        lengths += [domain["accept_length"] for domain in domains.values()]
    except (AttributeError, IndexError, KeyError, TypeError):
        return False
    return isinstance(row.get("step"), int) and all(isinstance(x, int | float) for x in lengths)
