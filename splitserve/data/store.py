"""Documents on disk, kept for the next run and read without loading them.

A store is a folder of flat arrays, mapped into memory:

    tokens.bin    int32, all documents one after the other
    used.bin      uint8, 1 for each token id that occurs
    mask.bin      uint8, 0 or 1 for each token
    index.bin     int64 [D, 5]: end in tokens, end in names, domain, whole and supervised tokens
    names.bin     the documents' ids, UTF-8
    store.json    format, key, domains, account, size and digest of each file

It is found by a key of everything that changes it. Whoever does not find it makes it, beside its
place, and moves it there whole: no process waits for another, and of two that make the same one
the first to finish has its own kept. Whoever makes one holds a lock on the folder that it works in,
which ends with the process; folders that nobody holds are removed by the next that makes one.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import tempfile
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from splitserve.data.account import DropReport
from splitserve.data.length import Document
from splitserve.data.pipeline import PipelineSettings
from splitserve.data.sources import SourceSettings, fingerprint
from splitserve.errors import UserError

FORMAT = 2
_DESCRIPTION = "store.json"
_ARRAYS = ("tokens.bin", "mask.bin", "index.bin", "names.bin", "used.bin")
_WORK = ".tmp-"
"""In the names of folders that are being worked in."""
_WORK_NAME = re.compile(r"([0-9a-f]+|unkeyed)\.tmp-\w+")
_NO_RESULT = ("num_workers", "max_drop_fraction", "max_zero_mask_fraction")
"""Settings that change no document."""


class StoreBroken(Exception):  # noqa: N818 - the store is, not the program
    """A folder is no whole store of that key; the text says why."""


class DocumentStore:
    """A finished store, open for reading; documents are copied out one at a time.

    Args:
        folder: of the store.
        key: that it must have; empty takes any.
        verify: compare every file's digest, which reads it once.

    Raises:
        StoreBroken: a file is missing, cut or changed, or the store is of another key or format.
    """

    def __init__(self, folder: Path, key: str = "", *, verify: bool = True) -> None:
        self.folder = folder
        try:
            described = json.loads((folder / _DESCRIPTION).read_text(encoding="utf-8"))
            own_digest = described.pop("digest")
            if own_digest != _description_digest(described):
                raise StoreBroken(f"{folder / _DESCRIPTION} is not what was written")
            if described["format"] != FORMAT or (key and described["key"] != key):
                raise StoreBroken(f"{folder} was made from something else")
            for name in _ARRAYS:
                _check_file(folder / name, described["files"][name], verify)
            self.report = DropReport.from_dict(described["report"])
            self._domains = [str(name) for name in described["domains"]]
            self.key = str(described["key"])
            self.notes = dict(described["notes"])
            """What was kept beside the documents."""
            self.digest = _description_digest(described["files"])
            """Of all that the documents are."""
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise StoreBroken(f"{folder}: {type(error).__name__}: {error}") from error
        self._tokens = _mapped(folder / "tokens.bin", np.int32)
        self._mask = _mapped(folder / "mask.bin", np.uint8)
        self._index = _mapped(folder / "index.bin", np.int64).reshape(-1, 5)
        self._names = _mapped(folder / "names.bin", np.uint8)
        self._used = _mapped(folder / "used.bin", np.uint8)
        if len(self._index) != self.report.num_used:
            raise StoreBroken(
                f"{folder} has {len(self._index)} of {self.report.num_used} documents"
            )

    def __len__(self) -> int:
        return len(self._index)

    def __getitem__(self, place: int) -> Document:
        if not 0 <= place < len(self):
            raise IndexError(f"document {place} of {len(self)}")
        first = self._index[place - 1, 0] if place else 0
        stop, _, domain, whole, supervised = (int(v) for v in self._index[place])
        return Document(
            self.name(place),
            self._domains[domain],
            self._tokens[first:stop].astype(np.int64),
            self._mask[first:stop].astype(bool),
            whole,
            supervised,
        )

    def __iter__(self) -> Iterator[Document]:
        return (self[place] for place in range(len(self)))

    def name(self, place: int) -> str:
        """The id of a document."""
        first = self._index[place - 1, 1] if place else 0
        return bytes(self._names[first : self._index[place, 1]]).decode("utf-8")

    def used_ids(self) -> frozenset[int]:
        """The token ids that occur in any document."""
        return frozenset(np.flatnonzero(self._used).tolist())

    def lengths(self) -> np.ndarray:
        """Tokens of each document, int64 [D]."""
        return np.diff(self._index[:, 0], prepend=0)


def store_key(
    sources: Sequence[SourceSettings],
    settings: PipelineSettings,
    tokenizer: Any,
    *,
    until: str = "all",
    end_of_turn_ids: Sequence[int] = (),
    eval_sources: Sequence[str] = (),
    more: Any = None,
) -> str:
    """A digest of everything that decides what documents come out; "" where it cannot be known.

    That is: the content of all sources, their weights and domains, the tokenizer with its chat
    template, the settings, the versions of the libraries that render and tokenize, and the text
    of this package's own code. A source that is streamed has no known content.

    Args:
        more: whatever else the documents follow from, ready for JSON.
    """
    contents = [fingerprint(s.path) for s in sources]
    eval_contents = [fingerprint(path) for path in eval_sources]
    if not all([*contents, *eval_contents]):
        return ""
    kept = {name: value for name, value in asdict(settings).items() if name not in _NO_RESULT}
    what = {
        "format": FORMAT,
        # The name is in the ids of rows that have none of their own.
        "sources": [
            [content, Path(s.path).name, s.weight, s.domain]
            for content, s in zip(contents, sources, strict=True)
        ],
        "until": until,
        "eval": eval_contents,
        "settings": kept,
        "more": more,
        "end_of_turn_ids": sorted(end_of_turn_ids),
        "tokenizer": hashlib.blake2b(tokenizer.backend_tokenizer.to_str().encode()).hexdigest(),
        "special_tokens": {k: str(v) for k, v in tokenizer.special_tokens_map.items()},
        "split_special_tokens": bool(getattr(tokenizer, "split_special_tokens", False)),
        "template": tokenizer.chat_template,
        "versions": {name: version(name) for name in ("tokenizers", "transformers", "jinja2")},
        "code": _code_digest(),
    }
    text = json.dumps(what, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def open_or_build(
    cache_dir: Path,
    key: str,
    build: Callable[[], tuple[Iterable[Document], DropReport]],
    notes: Mapping[str, Any] | None = None,
) -> tuple[DocumentStore, bool]:
    """The store of a key, made now if it is not there; whether it was there.

    Args:
        cache_dir: where stores are kept, one folder a key.
        key: from `store_key`; with an empty one the store is made anew each time.
        build: gives the documents and their account, which is complete when they have been read.
        notes: kept beside the documents, ready for JSON; `build` may still fill them.

    Raises:
        UserError: the folder cannot be written.
    """
    folder = cache_dir / (key or "unkeyed")
    if key:
        with contextlib.suppress(StoreBroken):
            return DocumentStore(folder, key), True
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(cache_dir)
        work, lock = _new_work(folder)
    except OSError as error:
        raise UserError(
            "data.cache_dir", str(cache_dir), "a folder that can be written", f"{error.strerror}"
        ) from error
    try:
        documents, report = build()
        _write(work, key, documents, report, notes or {})
        return DocumentStore(_move(work, folder, key), key, verify=False), False
    except OSError as error:
        raise UserError(
            "data.cache_dir",
            str(cache_dir),
            "a folder with room for the documents",
            f"{error.strerror}; free space or name another",
        ) from error
    finally:
        shutil.rmtree(work, ignore_errors=True)
        os.close(lock)


def _new_work(folder: Path) -> tuple[Path, int]:
    """A new folder to work in, beside the place of the finished one, and its lock."""
    while True:
        work = Path(tempfile.mkdtemp(prefix=f"{folder.name}{_WORK}", dir=folder.parent))
        # Until it is locked, another process may take it for an abandoned one.
        with contextlib.suppress(FileNotFoundError):
            lock = os.open(work, os.O_RDONLY)
            fcntl.flock(lock, fcntl.LOCK_EX)
            if work.is_dir():
                return work, lock
            os.close(lock)


def _remove_abandoned(cache_dir: Path) -> None:
    """Remove what processes that were killed have left."""
    for left in cache_dir.iterdir():
        if not _WORK_NAME.fullmatch(left.name):
            continue
        with contextlib.suppress(OSError):
            lock = os.open(left, os.O_RDONLY)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(left, ignore_errors=True)
            finally:
                os.close(lock)


def _move(work: Path, folder: Path, key: str) -> Path:
    """Put a finished store into its place, unless somebody else's good one is there already."""
    for _ in range(3):
        with contextlib.suppress(OSError):
            work.rename(folder)
            return folder
        if key:
            with contextlib.suppress(StoreBroken):
                return DocumentStore(folder, key).folder
        # Broken, or not to be kept: out of the way in one step, so that nobody sees half of it.
        away, lock = _new_work(folder)
        with contextlib.suppress(OSError):
            folder.rename(away / "old")
        shutil.rmtree(away, ignore_errors=True)
        os.close(lock)
    work.rename(folder)
    return folder


def _write(
    folder: Path,
    key: str,
    documents: Iterable[Document],
    report: DropReport,
    notes: Mapping[str, Any],
) -> None:
    domains: dict[str, int] = {}
    num_tokens = num_name_bytes = 0
    occurs = np.zeros(0, dtype=np.uint8)
    with contextlib.ExitStack() as stack:
        tokens, mask, index, names, used = (
            stack.enter_context(_HashedFile(folder / name)) for name in _ARRAYS
        )
        for document in documents:
            name = document.id.encode("utf-8")
            num_tokens += len(document.token_ids)
            num_name_bytes += len(name)
            highest = int(document.token_ids.max())
            if highest >= len(occurs):
                occurs = np.append(occurs, np.zeros(highest + 1 - len(occurs), np.uint8))
            occurs[document.token_ids] = 1
            tokens.write(document.token_ids.astype(np.int32).tobytes())
            mask.write(document.loss_mask.astype(np.uint8).tobytes())
            names.write(name)
            domain = domains.setdefault(document.domain, len(domains))
            row = (num_tokens, num_name_bytes, domain)
            whole = (document.num_whole, document.num_whole_supervised)
            index.write(array("q", (*row, *whole)).tobytes())
        used.write(occurs.tobytes())
        files = (tokens, mask, index, names, used)
    described: dict[str, Any] = {
        "format": FORMAT,
        "key": key,
        "domains": list(domains),
        "report": report.to_dict(),
        "notes": notes,
        "files": {name: file.described() for name, file in zip(_ARRAYS, files, strict=True)},
    }
    described["digest"] = _description_digest(described)
    (folder / _DESCRIPTION).write_text(json.dumps(described, indent=1) + "\n", encoding="utf-8")


def _description_digest(described: Mapping[str, Any]) -> str:
    text = json.dumps(described, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


class _HashedFile:
    """A file that is digested while it is written."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._digest = hashlib.blake2b(digest_size=16)
        self._size = 0
        self._file: BinaryIO

    def __enter__(self) -> _HashedFile:
        self._file = open(self._path, "wb", buffering=1 << 20)
        return self

    def __exit__(self, *_: object) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()

    def write(self, data: bytes) -> None:
        self._digest.update(data)
        self._size += len(data)
        self._file.write(data)

    def described(self) -> dict[str, Any]:
        return {"bytes": self._size, "blake2b": self._digest.hexdigest()}


def _check_file(path: Path, described: Mapping[str, Any], verify: bool) -> None:
    size = path.stat().st_size
    if size != described["bytes"]:
        raise StoreBroken(f"{path} has {size} of {described['bytes']} bytes")
    if not verify:
        return
    digest = hashlib.blake2b(digest_size=16)
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    if digest.hexdigest() != described["blake2b"]:
        raise StoreBroken(f"{path} is not what was written")


def _mapped(path: Path, dtype: Any) -> np.ndarray:
    if not path.stat().st_size:
        return np.zeros(0, dtype)
    return np.memmap(path, dtype, mode="r")


def _code_digest() -> str:
    digest = hashlib.blake2b(digest_size=16)
    for file in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()
