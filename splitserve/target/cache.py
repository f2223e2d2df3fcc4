"""The user's cache folder: a target made here is made once, and appears whole or not at all."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

MARKER = "splitserve_target.json"
Build = Callable[[Path, Path], Mapping[str, str]]
"""Fills a target folder: (folder for what is needed on the way, folder to fill) to what it was made
with."""


def make_once(
    name: str, marker: Mapping[str, Any], build: Build, cache_dir: Path | None = None
) -> Path:
    """The folder `targets/NAME` of the cache, built unless one of the same marker is complete.

    Args:
        marker: what the folder's content follows from; JSON values.
        cache_dir: `default_cache_dir()` by default.

    Raises:
        ValueError: the cache folder cannot be made. What `build` raises goes through, and leaves
            no folder.
    """
    cache = cache_dir or default_cache_dir()
    folder = cache / "targets" / name
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"the cache folder {str(cache)!r} cannot be made ({error}); allowed: a writable "
            "folder; set SPLITSERVE_CACHE to one"
        ) from error
    with _locked(folder.parent / f"{name}.lock"):
        if not _is_complete(folder, marker):
            _build_beside(folder, marker, build)
    return folder


def _build_beside(folder: Path, marker: Mapping[str, Any], build: Build) -> None:
    """Make the folder beside its place and move it there in one step."""
    for leftover in folder.parent.glob(f"{folder.name}.tmp-*"):
        # Made by a run that died: we hold the lock, so nobody works in it.
        shutil.rmtree(leftover, ignore_errors=True)
    work = Path(tempfile.mkdtemp(prefix=f"{folder.name}.tmp-", dir=folder.parent))
    try:
        filled = work / "target"
        made_with = dict(build(work, filled))
        sizes = {item.name: item.stat().st_size for item in sorted(filled.iterdir())}
        (filled / MARKER).write_text(
            json.dumps({**marker, "file_bytes": sizes, "made_with": made_with}, indent=2) + "\n",
            encoding="utf-8",
        )
        if folder.exists():
            shutil.rmtree(folder)
        filled.rename(folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def default_cache_dir() -> Path:
    """The user's cache folder for this program."""
    if chosen := os.environ.get("SPLITSERVE_CACHE"):
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "splitserve"


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock; the kernel lets go of it when the holder dies."""
    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _is_complete(folder: Path, marker: Mapping[str, Any]) -> bool:
    """True if the folder was made by this code from the same things, and nothing was cut."""
    try:
        found = json.loads((folder / MARKER).read_text(encoding="utf-8"))
        sizes = found.pop("file_bytes")
        found.pop("made_with")
        return found == marker and all(
            (folder / name).stat().st_size == size for name, size in sizes.items()
        )
    except (OSError, ValueError, KeyError, AttributeError):
        return False
