"""What the benchmarks' options take; argparse turns what is refused here into one line."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from splitserve.run.folder import CONFIG_NAME

RECORD_FIELDS = ("commit", "device", "versions", "date", "figures")


def positive(text: str) -> int:
    """A whole number, 1 or more."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not usable; allowed: a whole number from 1")
    return number


def two_or_more(text: str) -> int:
    """A whole number, 2 or more."""
    number = int(text) if text.strip().isdecimal() else 0
    if number < 2:
        raise argparse.ArgumentTypeError(f"{text!r} is not usable; allowed: a whole number from 2")
    return number


def record_file(text: str) -> dict[str, Any]:
    """The contents of a record that another benchmark has written."""
    try:
        found = json.loads(Path(text).read_text())
    except (OSError, ValueError) as error:
        raise argparse.ArgumentTypeError(
            f"{text}: {error}; allowed: a record that a benchmark has written"
        ) from error
    lacking = [n for n in RECORD_FIELDS if not isinstance(found, dict) or n not in found]
    if lacking:
        raise argparse.ArgumentTypeError(
            f"{text} has no {', '.join(lacking)}; allowed: a record that a benchmark has written"
        )
    return dict(found)


def run_folder(text: str) -> Path:
    """The folder of a run."""
    if not (Path(text) / CONFIG_NAME).is_file():
        raise argparse.ArgumentTypeError(
            f"{text} has no {CONFIG_NAME}; allowed: the folder of a run (run_dir)"
        )
    return Path(text)
