from __future__ import annotations

import json
import multiprocessing
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chat_templates import FAMILIES
from hypothesis import given
from hypothesis import strategies as st

from splitserve.data import store as store_module
from splitserve.data.account import DropReport
from splitserve.data.length import Document
from splitserve.data.pipeline import PipelineSettings
from splitserve.data.sources import SourceSettings
from splitserve.data.store import DocumentStore, StoreBroken, open_or_build, store_key
from splitserve.errors import UserError

KEY = "0123"


def document(name: str = "a", size: int = 4, domain: str = "d") -> Document:
    ids = np.arange(size, dtype=np.int64) + 100_000
    mask = np.arange(size) % 3 > 0
    return Document(name, domain, ids, mask, size + 2, int(mask.sum()) + 1)


def builder(documents: Iterable[Document]) -> Any:
    def build() -> tuple[Iterable[Document], DropReport]:
        report = DropReport()

        def counted() -> Iterable[Document]:
            for one in documents:
                report.use(one)
                yield one
            report.drop("x", "empty_answer")

        return counted(), report

    return build


def never() -> Any:
    raise AssertionError("the store is there and is not to be made again")


def as_tuple(d: Document) -> Any:
    ids, mask = d.token_ids, d.loss_mask
    return d.id, d.domain, ids.tolist(), mask.tolist(), d.num_whole, d.num_whole_supervised


@given(st.lists(st.tuples(st.text(max_size=5), st.integers(1, 9), st.sampled_from("xyz"))))
def test_documents_come_back_unchanged(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[str, int, str]]
) -> None:
    folder = tmp_path_factory.mktemp("cache")
    documents = [document(name, size, domain) for name, size, domain in rows]
    made, found = open_or_build(folder, KEY, builder(documents))
    again, found_again = open_or_build(folder, KEY, never)
    assert (found, found_again) == (False, True)
    for store in (made, again):
        assert [as_tuple(d) for d in store] == [as_tuple(d) for d in documents]
        assert store.lengths().tolist() == [size for _, size, _ in rows]
        assert store.report.num_used == len(rows)
        assert store.report.reasons == {"empty_answer": 1}
        assert [store.name(place) for place in range(len(store))] == [d.id for d in documents]
        assert store.used_ids() == {i for d in documents for i in d.token_ids.tolist()}
        assert store.digest == made.digest
    assert as_tuple(again[len(rows) - 1]) == as_tuple(documents[-1]) if rows else not len(again)
    with pytest.raises(IndexError):
        again[len(rows)]


def _cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def _flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[0] ^= 1
    file.write_bytes(data)


def _change(key: str, value: Any, sign: bool = True) -> Any:
    def change(file: Path) -> None:
        described = json.loads((file.parent / "store.json").read_text())
        described[key] = value
        if sign:
            del described["digest"]
            described["digest"] = store_module._description_digest(described)
        (file.parent / "store.json").write_text(json.dumps(described))

    return change


FILES = ("tokens.bin", "mask.bin", "index.bin", "names.bin", "used.bin", "store.json")


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", [_cut, _flip, Path.unlink], ids=["cut", "flip", "remove"])
def test_a_damaged_store_is_made_again(tmp_path: Path, name: str, damage: Any) -> None:
    documents = [document("a"), document("b", 7)]
    open_or_build(tmp_path, KEY, builder(documents))
    if name == "store.json" and damage is _cut:
        damage = _change("format", 0)
    damage(tmp_path / KEY / name)
    with pytest.raises(StoreBroken):
        DocumentStore(tmp_path / KEY, KEY)
    store, found = open_or_build(tmp_path, KEY, builder(documents))
    assert not found
    assert [as_tuple(d) for d in store] == [as_tuple(d) for d in documents]
    assert open_or_build(tmp_path, KEY, never)[1]
    assert [p.name for p in tmp_path.iterdir()] == [KEY]


@pytest.mark.parametrize(
    ("key", "value", "sign"),
    [("key", "4567", True), ("report", {}, True), ("files", [], True), ("domains", ["x"], False)],
)
def test_a_foreign_store_is_made_again(tmp_path: Path, key: str, value: Any, sign: bool) -> None:
    open_or_build(tmp_path, KEY, builder([document("a")]))
    _change(key, value, sign)(tmp_path / KEY / "x")
    store, found = open_or_build(tmp_path, KEY, builder([document("b")]))
    assert (found, store[0].id) == (False, "b")


def test_without_a_key_nothing_is_trusted(tmp_path: Path) -> None:
    for name in ("a", "b"):
        store, found = open_or_build(tmp_path, "", builder([document(name)]))
        assert (found, store[0].id) == (False, name)


def test_a_build_that_fails_leaves_nothing(tmp_path: Path) -> None:
    def fails() -> Any:
        yield document("a")
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError):
        open_or_build(tmp_path, KEY, builder(fails()))
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"data\.cache_dir=.*file"):
        open_or_build(tmp_path / "file", KEY, never)


def _slow_build(folder: str, begun: Any, go: Any) -> None:
    def documents() -> Iterable[Document]:
        yield document("slow")
        begun.set()
        go.wait(60)

    open_or_build(Path(folder), KEY, builder(documents()))


def test_what_a_killed_build_has_left_is_removed_by_the_next(tmp_path: Path) -> None:
    """Only that: another's folder stays, and so does that of a process that is still at work."""
    context = multiprocessing.get_context("fork")
    events = [(context.Event(), context.Event()) for _ in range(2)]
    killed, alive = (
        context.Process(target=_slow_build, args=(str(tmp_path), begun, go)) for begun, go in events
    )
    foreign = tmp_path / "mine.tmp-1"
    foreign.mkdir()
    killed.start()
    assert events[0][0].wait(30)
    (left,) = tmp_path.glob(f"{KEY}.tmp-*")
    killed.kill()
    killed.join(30)
    assert left.is_dir() and list(left.iterdir()), "the build had begun to write"
    alive.start()
    try:
        assert events[1][0].wait(30)
        assert not left.exists()
        open_or_build(tmp_path, "4567", builder([document("b")]))
        (at_work,) = tmp_path.glob(f"{KEY}.tmp-*")
    finally:
        events[1][1].set()
        alive.join(30)
    assert alive.exitcode == 0
    assert not at_work.exists() and foreign.is_dir()
    assert open_or_build(tmp_path, KEY, never)[0][0].id == "slow"


def test_nobody_waits_for_a_process_that_tokenizes(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    begun, go = context.Event(), context.Event()
    slow = context.Process(target=_slow_build, args=(str(tmp_path), begun, go))
    slow.start()
    try:
        assert begun.wait(30)
        start = time.monotonic()
        store, found = open_or_build(tmp_path, KEY, builder([document("fast")]))
        assert time.monotonic() - start < 5
        assert (found, store[0].id) == (False, "fast")
    finally:
        go.set()
        slow.join(30)
    assert slow.exitcode == 0
    # The first to finish is kept, and is never replaced under those who read it.
    assert open_or_build(tmp_path, KEY, never)[0][0].id == "fast"
    assert [p.name for p in tmp_path.iterdir()] == [KEY]


# --- the key -------------------------------------------------------------------------------------


def test_everything_that_changes_the_result_changes_the_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in (("a.txt", "x\n"), ("b.txt", "y\n"), ("e.txt", "z\n")):
        (tmp_path / name).write_text(text)
    source = SourceSettings(str(tmp_path / "a.txt"))
    other = SourceSettings(str(tmp_path / "b.txt"))
    settings = PipelineSettings()
    family = FAMILIES["headers"]

    def key(
        sources: Any = (source,), kept: Any = settings, tokenizer: Any = None, **more: Any
    ) -> str:
        return store_key(sources, kept, tokenizer or family.tokenizer(), **more)

    changed_template = family.tokenizer()
    changed_template.chat_template += " "
    changed_tokens = family.tokenizer()
    changed_tokens.add_special_tokens({"additional_special_tokens": ["<new>"]})
    changed_end = family.tokenizer()
    changed_end.eos_token = "<|/head|>"
    keys = [
        key(),
        key((other,)),
        key((source, other)),
        key((other, source)),
        key((source, replace(other, weight=2.0))),
        key((source, replace(other, domain="m"))),
        key((source, other), until="first"),
        key(kept=replace(settings, max_tokens=100)),
        key(kept=replace(settings, chat_template_kwargs={"enable_thinking": False})),
        key(kept=replace(settings, system_prompt="s")),
        key(kept=replace(settings, last_answer_only=True)),
        key(end_of_turn_ids=[3]),
        key(eval_sources=[str(tmp_path / "e.txt")]),
        key(tokenizer=changed_template),
        key(tokenizer=changed_tokens),
        key(tokenizer=changed_end),
    ]
    monkeypatch.setattr(store_module, "version", lambda name: "0")
    keys.append(key())
    monkeypatch.undo()
    monkeypatch.setattr(store_module, "_code_digest", lambda: "0")
    keys.append(key())
    monkeypatch.undo()
    (tmp_path / "a.txt").write_text("w\n")
    keys.append(key())
    assert len(set(keys)) == len(keys) and all(keys)
    (tmp_path / "a.txt").write_text("x\n")
    assert key() == keys[0]
    assert key(kept=replace(settings, num_workers=2, max_drop_fraction=0.1)) == keys[0]
    assert key((SourceSettings("hf:somewhere"),)) == ""
