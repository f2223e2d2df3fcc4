"""Rows from files, folders and Hugging Face datasets, one at a time.

A source is named by a text:

    rows.jsonl, rows.jsonl.gz, rows.json     JSON lines, UTF-8
    rows.parquet
    prompts.txt                              a prompt a line
    FOLDER                                   all such files below it, in the order of their names;
                                             or a dataset that `datasets` has saved to disk
    hf:NAME, hf:NAME//CONFIG@SPLIT           a dataset for `datasets.load_dataset`, streamed: of
                                             the hub or a folder; the split is train by default

Nothing is held but a batch of rows. A line that cannot be read is a row that is refused, so that
it is counted like any other.
"""

from __future__ import annotations

import gzip
import hashlib
import heapq
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

from splitserve.data.conversation import shown
from splitserve.data.refusal import Reason, RowRefused
from splitserve.errors import UserError

SUFFIXES = (".jsonl", ".jsonl.gz", ".json", ".parquet", ".txt")
_PARQUET_BATCH_ROWS = 512
_HUB = "hf:"


@dataclass(frozen=True, slots=True)
class RawRow:
    """One row as the source gave it.

    Attributes:
        place: file or dataset and number, the row's id where it has none of its own.
        value: bytes of a JSON line, or the row's fields.
    """

    place: str
    value: Any


@dataclass(frozen=True, slots=True)
class SourceSettings:
    """One source of a mixture."""

    path: str
    """What to read, as the text at the top of this file says."""
    weight: float = 1.0
    """Rows taken from it, relative to the other sources."""
    domain: str = ""
    """Of rows that name none; empty takes "general"."""

    def __post_init__(self) -> None:
        if not self.path:
            raise UserError("data.path", self.path, "a file, a folder or hf:NAME", "name one")
        if not 0.0 < self.weight < float("inf"):
            raise UserError("data.weight", self.weight, "above 0, finite", "correct it")


def parse_json(row: RawRow) -> Any:
    """The fields of a row; raises RowRefused for a line that is not JSON in UTF-8."""
    if not isinstance(row.value, bytes):
        return row.value
    try:
        text = row.value.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RowRefused(
            Reason.MALFORMED_ROW, f"not UTF-8 ({error.reason} at byte {error.start})"
        ) from error
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise RowRefused(
            Reason.MALFORMED_ROW,
            f"found {shown(text)}, not JSON ({error.msg} at column {error.colno})",
        ) from error


def read_rows(path: str, field: str = "data.path") -> Iterator[RawRow]:
    """Every row of a source, in an order that is always the same.

    Args:
        path: see the top of this file.
        field: the setting that errors name.

    Raises:
        UserError: there is nothing of that name, or it is not readable.
    """
    if path.startswith(_HUB):
        yield from _hub_rows(path, field)
        return
    if _is_saved_dataset(Path(path)):
        yield from _saved_rows(Path(path), field)
        return
    root = Path(path) if Path(path).is_dir() else Path(path).parent
    for file in source_files(path, field):
        yield from _file_rows(file, str(file.relative_to(root)), field)


def check_source(path: str, field: str = "data.path") -> None:
    """See that a source is there, as far as that shows without reading it.

    Raises:
        UserError: it is not.
    """
    if not path.startswith(_HUB) and not _is_saved_dataset(Path(path)):
        source_files(path, field)


def source_files(path: str, field: str = "data.path") -> tuple[Path, ...]:
    """The files of a source that is not a dataset, in the order in which they are read.

    Raises:
        UserError: there are none.
    """
    place = Path(path)
    if place.is_dir():
        files = tuple(
            sorted(f for f in place.rglob("*") if f.is_file() and f.name.endswith(SUFFIXES))
        )
        if not files:
            raise UserError(
                field, path, f"a folder with files that end in {', '.join(SUFFIXES)}", "check it"
            )
        return files
    if not place.is_file():
        raise UserError(field, path, "an existing file or folder, or hf:NAME", "check the path")
    if not place.name.endswith(SUFFIXES):
        raise UserError(
            field, path, f"a file that ends in {', '.join(SUFFIXES)}", "rename or convert it"
        )
    return (place,)


def fingerprint(path: str, field: str = "data.path") -> str:
    """A digest of all that a source holds; empty where that cannot be known, as for the hub."""
    if path.startswith(_HUB):
        return ""
    digest = hashlib.blake2b(digest_size=16)
    place = Path(path)
    if _is_saved_dataset(place):
        files = tuple(sorted(f for f in place.rglob("*") if f.is_file()))
    else:
        files = source_files(path, field)
    for file in files:
        digest.update(f"{file.name}\0{file.stat().st_size}\0".encode())
        with open(file, "rb") as stream:
            while block := stream.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()


def mix(sources: Sequence[SourceSettings], *, until: str = "all") -> Iterator[tuple[RawRow, str]]:
    """Rows of several sources in proportion to their weights, each with its default domain.

    At any place the number of rows taken from a source differs from its share by less than one
    row for each source. The order follows from sources and weights alone.

    Args:
        until: "all" goes on with the others when a source ends, so that every row comes once;
            "first" ends there, so that the proportions hold throughout.

    Raises:
        UserError: no sources, or another `until`.
    """
    if not sources:
        raise UserError("data.sources", [], "one source or more", "name a file")
    if until not in ("all", "first"):
        raise UserError("data.until", until, "all, first", "choose one")
    streams = [read_rows(source.path) for source in sources]
    # The source that is furthest behind comes next: the time of its k-th row is k over its weight.
    queue = [(1 / source.weight, k, 1) for k, source in enumerate(sources)]
    heapq.heapify(queue)
    while queue:
        _, k, number = heapq.heappop(queue)
        row = next(streams[k], None)
        if row is None:
            if until == "first":
                return
            continue
        yield row, sources[k].domain or "general"
        heapq.heappush(queue, ((number + 1) / sources[k].weight, k, number + 1))


def _file_rows(file: Path, label: str, field: str) -> Iterator[RawRow]:
    if file.name.endswith(".parquet"):
        yield from _parquet_rows(file, label, field)
        return
    number = 0
    try:
        with _opened(file) as stream:
            for number, line in enumerate(stream, start=1):
                if not line.strip():
                    continue
                if file.name.endswith(".txt"):
                    yield RawRow(f"{label}:{number}", {"prompt": _text_line(line)})
                else:
                    yield RawRow(f"{label}:{number}", line)
    except (OSError, EOFError) as error:
        raise UserError(
            field, str(file), "a readable file", f"it fails after line {number} ({error})"
        ) from error


def _text_line(line: bytes) -> str:
    # Half of a surrogate pair stands for each bad byte; the row is refused for it later on.
    return line.rstrip(b"\r\n").decode("utf-8", "surrogateescape")


def _opened(file: Path) -> BinaryIO:
    if file.name.endswith(".gz"):
        return cast(BinaryIO, gzip.open(file, "rb"))
    return open(file, "rb")


def _parquet_rows(file: Path, label: str, field: str) -> Iterator[RawRow]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(file) as table:
            number = 0
            for batch in table.iter_batches(_PARQUET_BATCH_ROWS):
                for row in batch.to_pylist():
                    number += 1
                    yield RawRow(f"{label}:{number}", row)
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(
            field, str(file), "a Parquet file", f"it is unreadable ({error})"
        ) from error


def _is_saved_dataset(path: Path) -> bool:
    return path.is_dir() and any(
        (path / name).is_file() for name in ("state.json", "dataset_dict.json")
    )


def _saved_rows(path: Path, field: str) -> Iterator[RawRow]:
    import datasets

    try:
        loaded = datasets.load_from_disk(str(path))
    except (OSError, ValueError) as error:
        raise UserError(
            field, str(path), "a dataset saved by `datasets`", f"it is unreadable ({error})"
        ) from error
    parts = loaded if isinstance(loaded, dict) else {"": loaded}
    for name, part in parts.items():
        label = f"{path.name}/{name}" if name else path.name
        for number, row in enumerate(part, start=1):
            yield RawRow(f"{label}:{number}", row)


def _hub_rows(path: str, field: str) -> Iterator[RawRow]:
    import datasets

    name, _, split = path.removeprefix(_HUB).partition("@")
    folder, _, config = name.partition("//")
    try:
        stream = datasets.load_dataset(
            folder, config or None, split=split or "train", streaming=True
        )
        for number, row in enumerate(stream, start=1):
            yield RawRow(f"{folder}:{number}", row)
    except (OSError, ValueError, RuntimeError) as error:
        raise UserError(
            field,
            path,
            "hf:NAME, hf:NAME//CONFIG@SPLIT",
            f"it could not be streamed ({' '.join(str(error).split())[:200]}); check name, split "
            "and network, or download it and name the folder",
        ) from error
