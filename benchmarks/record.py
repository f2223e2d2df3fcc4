"""The record of a measurement: `benchmarks/results/NAME.json`."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PACKAGES = ("torch", "triton", "sglang", "deepspeed", "transformers")


def write_record(
    name: str,
    figures: Mapping[str, Any],
    *,
    command: str = "",
    folder: Path | None = None,
    like: Mapping[str, Any] | None = None,
) -> None:
    """Write the figures with what they hang on, and print the same object as one line.

    Args:
        figures: flat, units in the names.
        command: what was run; by default this process's own command line.
        folder: by default `benchmarks/results`.
        like: a record of the machine and the sources that gave the figures, where they are put
            together elsewhere.
    """
    record = {
        "name": name,
        "command": command or " ".join(["python", *sys.argv]),
        "commit": commit(),
        "device": device(),
        "versions": versions(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "figures": dict(figures),
    }
    if like is not None:
        record |= {key: like[key] for key in ("commit", "device", "versions", "date")}
    path = (folder or RESULTS) / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=2) + "\n")
    print(json.dumps(record))


def device() -> dict[str, Any]:
    """This machine's GPUs, if any, its processor, cores and memory."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    models = [x.partition(":")[2].strip() for x in lines if x.startswith("model name")]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    found = {
        "processor": models[0] if models else platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory / 2**30, 1),
    }
    import torch

    if torch.cuda.is_available():
        found["gpus"] = [
            torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())
        ]
    return found


def versions() -> dict[str, str | None]:
    """Python and the packages that the figures hang on; None for one that is not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


def commit() -> str:
    """The sources' commit, marked where files differ from it.

    SPLITSERVE_COMMIT says it where the sources lie without their history.
    """
    if told := os.environ.get("SPLITSERVE_COMMIT"):
        return told

    def git(*arguments: str) -> str:
        result = subprocess.run(
            ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True
        )
        return result.stdout.strip()

    changed = git("status", "--porcelain", "--untracked-files=no")
    return git("rev-parse", "HEAD") + ("-changed" if changed else "")
