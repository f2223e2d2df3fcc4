from __future__ import annotations

import gzip
import json
import tracemalloc
from collections import Counter
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitserve.data.conversation import Conversation, TokenRow, parse_row
from splitserve.data.refusal import RowRefused
from splitserve.data.sources import (
    RawRow,
    SourceSettings,
    fingerprint,
    mix,
    parse_json,
    read_rows,
)
from splitserve.errors import UserError


def chat(name: str) -> dict[str, Any]:
    return {"id": name, "messages": [{"role": "user", "content": f"hi {name}"}]}


def write_jsonl(path: Path, rows: list[Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def ids(path: Path | str) -> list[str]:
    return [parse_row(parse_json(row), row.place, "d").id for row in read_rows(str(path))]


def test_json_lines_plain_and_compressed(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [chat("1"), {**chat("x"), "id": None}, chat("3")])
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(b"\n" + path.read_bytes()))
    assert ids(path) == ["1", "a.jsonl:2", "3"]
    assert ids(tmp_path / "b.jsonl.gz") == ["1", "b.jsonl.gz:3", "3"]


def test_a_bad_line_is_a_row_that_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"id": \n' + b'"\xff"\n' + json.dumps(chat("3")).encode())
    found = []
    for row in read_rows(str(path)):
        try:
            found.append(parse_json(row)["id"])
        except RowRefused as refused:
            found.append(refused.detail.split(" (")[0][-8:])
    assert found == ["not JSON", "ot UTF-8", "3"]


def test_parquet_with_nested_and_token_rows(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    rows = [chat(str(i)) for i in range(700)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=100)
    assert ids(path) == [str(i) for i in range(700)]
    tokens = [{"input_ids": [1, 2], "loss_mask": [0, 1]}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(tokens), path)
    (row,) = read_rows(str(path))
    parsed = parse_row(row.value, row.place, "d")
    assert isinstance(parsed, TokenRow) and parsed.loss_mask.tolist() == [False, True]
    path.write_bytes(b"PAR1 no table")
    with pytest.raises(UserError, match=r"data\.path=.*a\.parquet.*unreadable"):
        list(read_rows(str(path)))


def test_plain_prompts(tmp_path: Path) -> None:
    path = tmp_path / "p.txt"
    path.write_bytes("What is 1+1?\r\n\n  \u00e4 \n".encode() + b"\xff\n")
    rows = list(read_rows(str(path)))
    first = parse_row(rows[0].value, rows[0].place, "d")
    assert isinstance(first, Conversation)
    assert (first.id, first.messages[0]["content"]) == ("p.txt:1", "What is 1+1?")
    assert rows[1].value == {"prompt": "  \u00e4 "}
    with pytest.raises(RowRefused, match="surrogate"):
        parse_row(rows[2].value, "a", "d")


def test_a_folder_of_shards_is_read_by_name(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "in" / "b.jsonl", [chat("3")])
    write_jsonl(tmp_path / "in" / "a" / "z.jsonl", [{**chat("1"), "id": ""}, chat("2")])
    (tmp_path / "in" / "notes.md").write_text("no rows")
    assert ids(tmp_path / "in") == ["a/z.jsonl:1", "2", "3"]
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"data\.path=.*empty.*\.parquet"):
        list(read_rows(str(tmp_path / "empty")))


@pytest.mark.parametrize("split", [False, True])
def test_datasets_saved_to_disk(tmp_path: Path, split: bool) -> None:
    made = datasets.Dataset.from_list([chat("1"), chat("2")])
    whole = datasets.DatasetDict({"train": made}) if split else made
    whole.save_to_disk(str(tmp_path / "set"))
    assert ids(tmp_path / "set") == ["1", "2"]
    assert fingerprint(str(tmp_path / "set"))


def test_streams_of_datasets(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "set" / "train.jsonl", [chat("1"), chat("2")])
    write_jsonl(tmp_path / "set" / "test.jsonl", [chat("3")])
    assert ids(f"hf:{tmp_path / 'set'}") == ["1", "2"]
    assert ids(f"hf:{tmp_path / 'set'}@test") == ["3"]
    assert fingerprint(f"hf:{tmp_path / 'set'}") == ""
    with pytest.raises(UserError, match=r"hf:.*could not be streamed"):
        list(read_rows(f"hf:{tmp_path / 'set'}@nowhere"))


@pytest.mark.parametrize("name", ["none.jsonl", "a.csv"])
def test_what_is_not_a_source(tmp_path: Path, name: str) -> None:
    (tmp_path / "a.csv").write_text("a,b")
    with pytest.raises(UserError, match=rf"data\.prompts='.*{name}' .*allowed") as caught:
        list(read_rows(str(tmp_path / name), "data.prompts"))
    assert "\n" not in str(caught.value)


def test_a_cut_off_archive_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"id": 1}\n' * 999)[:-20])
    with pytest.raises(UserError, match=r"a\.jsonl\.gz.*fails after line"):
        list(read_rows(str(path)))


def test_the_fingerprint_is_of_the_content(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [chat("1")])
    first = fingerprint(str(path))
    assert first == fingerprint(str(path)) and first
    write_jsonl(path, [chat("2")])
    assert fingerprint(str(path)) != first
    write_jsonl(path, [chat("1")])
    assert fingerprint(str(path)) == first


@given(
    st.lists(st.tuples(st.integers(0, 30), st.integers(1, 5)), min_size=1, max_size=4),
    st.booleans(),
)
def test_mixtures_keep_their_proportions(
    tmp_path_factory: pytest.TempPathFactory, parts: list[tuple[int, int]], first: bool
) -> None:
    folder = tmp_path_factory.mktemp("mix")
    sources = []
    for k, (count, weight) in enumerate(parts):
        path = folder / f"{k}.txt"
        path.write_text("x\n" * count)
        sources.append(SourceSettings(str(path), weight, f"d{k}"))
    taken: Counter[str] = Counter()
    places = []
    left = {f"d{k}": count for k, (count, _) in enumerate(parts)}
    total = sum(weight for _, weight in parts)
    for row, domain in mix(sources, until="first" if first else "all"):
        taken[domain] += 1
        places.append(row.place)
        if all(taken[d] < left[d] for d in left):
            for k, (_, weight) in enumerate(parts):
                share = sum(taken.values()) * weight / total
                assert abs(taken[f"d{k}"] - share) <= len(parts)
    assert len(set(places)) == len(places)
    if not first:
        assert {d: taken[d] for d in left} == left
    else:
        assert any(taken[d] == left[d] for d in left)
    again = mix(sources, until="first" if first else "all")
    assert [row.place for row, _ in again] == places


def test_bad_mixtures(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"data\.weight=0"):
        SourceSettings("a.jsonl", 0.0)
    with pytest.raises(UserError, match=r"data\.path=''"):
        SourceSettings("")
    with pytest.raises(UserError, match=r"data\.sources=\[\]"):
        list(mix([]))
    with pytest.raises(UserError, match=r"data\.until='last'.*all, first"):
        list(mix([SourceSettings("a.txt")], until="last"))


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_memory_does_not_grow_with_the_rows(tmp_path: Path, kind: str) -> None:
    def peak(count: int) -> int:
        rows = [chat(f"{i:06d}") for i in range(count)]
        path = tmp_path / f"{count}.{kind}"
        if kind == "jsonl":
            write_jsonl(path, rows)
        else:
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=1000)
        del rows
        tracemalloc.start()
        assert sum(1 for _ in read_rows(str(path))) == count
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return most

    peak(500)
    assert peak(20_000) < 1.5 * peak(2_000) + 100_000


def test_rows_in_memory_are_passed_on() -> None:
    assert parse_json(RawRow("a", {"id": 1})) == {"id": 1}
