from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from chat_templates import FAMILIES

from splitserve import cli
from splitserve.data import commands

HI = {"role": "user", "content": "What is two plus two?"}
ROWS = [
    {
        "id": "a",
        "domain": "math",
        "messages": [HI, {"role": "assistant", "content": "It is four."}],
    },
    {"id": "b", "messages": [HI, {"role": "assistant", "content": "[bold]four[/bold] " * 40}]},
    {"id": "c", "messages": [HI]},
]


@pytest.fixture
def target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a tokenizer, and with as much of a model as is looked at."""
    folder = tmp_path / "target"
    FAMILIES["headers"].tokenizer().save_pretrained(folder)
    config = {"num_hidden_layers": 2, "hidden_size": 8, "vocab_size": 400}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes(b"")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SPLITSERVE_CACHE", str(tmp_path / "cache"))
    write(tmp_path / "rows.jsonl", ROWS)
    return folder


def write(path: Path, rows: list[Any]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_preview_shows_every_row_and_writes_a_page(
    target: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["data", "preview", "target=target", "data=rows.jsonl", "max_tokens=60", "out=p.html"]
    assert cli.main(command) == 0
    out = capsys.readouterr().out
    assert "a (math): " in out and "It is four.<|eot|>" in out
    assert "cut off" in out and "[bold]four[/bold]" in out
    assert "rows.jsonl:3: dropped as no_answer" in out
    page = Path("p.html").read_text()
    assert "<span class=supervised>It is four.&lt;|eot|&gt;</span>" in page
    assert page.count("<h2>") == 3 and "<span class=truncated>" in page
    assert cli.main([*command[:-1], "num=1", "skip=1"]) == 0
    assert "b (general)" in capsys.readouterr().out.splitlines()[0]


def test_stats_are_written_counted_and_kept(
    target: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["data", "stats", "target=target", "data=rows.jsonl", "max_tokens=60", "out=s.json",
               "max_zero_mask_fraction=0.5", "num_anchors=3"]  # fmt: skip
    assert cli.main(command) == 0
    assert "documents kept in" in capsys.readouterr().out
    first = json.loads(Path("s.json").read_text())
    assert (first["rows"], first["used"], first["truncated"]) == (3, 2, 1)
    assert first["dropped"] == {"no_answer": 1} and first["examples"]["no_answer"]
    assert first["expected_anchors"] == 6 and first["duplicate_prompts"] == 1
    assert 0 < first["supervised_kept"] < 1
    assert set(first["domains"]) == {"math", "general"}
    assert cli.main(command) == 0
    out = capsys.readouterr().out
    assert "documents found in" in out and "[bold]" not in out
    assert json.loads(Path("s.json").read_text()) == first
    for other in (["cache=false"], ["num_workers=1", "cache=false"]):
        assert cli.main([*command, *other]) == 0
        assert json.loads(Path("s.json").read_text()) == first


def test_stats_stop_at_a_limit_also_from_the_cache(
    target: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["data", "stats", "target=target", "data=rows.jsonl"]
    for _ in range(2):
        assert cli.main(command) == 2
        assert "data.max_zero_mask_fraction: 1 of 3 rows" in capsys.readouterr().err


def test_stats_find_eval_prompts_and_mixtures(
    target: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(Path("eval.jsonl"), [{"id": "e", "messages": [HI]}])
    write(Path("more.jsonl"), [{"prompt": "x", "response": "It is four."}] * 4)
    command = ["data", "stats", "target=target", "eval=eval.jsonl", "out=s.json", "until=first",
               "data=[{path: rows.jsonl, weight: 1}, {path: more.jsonl, weight: 2, domain: m}]",
               "max_drop_fraction=1"]  # fmt: skip
    assert cli.main(command) == 0
    figures = json.loads(Path("s.json").read_text())
    assert figures["dropped"] == {"eval_leak": 2}
    assert figures["domains"]["m"]["documents"] == 4


@pytest.mark.parametrize(
    ("arguments", "contains"),
    [
        ([], "preview, stats, generate"),
        (["previews"], "did you mean 'preview'?"),
        (["preview"], "data=''"),
        (["preview", "data=rows.jsonl"], "target=''"),
        (["preview", "data=none.jsonl", "target=target"], "none.jsonl"),
        (["preview", "data=rows.jsonl", "target=nowhere"], "nowhere"),
        (["preview", "data=rows.jsonl", "target=target", "num=0"], "num=0"),
        (["preview", "data=rows.jsonl", "target=target", "skip=-1"], "skip=-1"),
        (["preview", "data=rows.jsonl", "target=target", "skip=9"], "more than 9 rows"),
        (["preview", "data=rows.jsonl", "target=target", "num=many"], "Integer"),
        (["preview", "dta=rows.jsonl"], "did you mean 'data'?"),
        (["preview", "data=[{path: a, wieght: 2}]"], "did you mean 'weight'?"),
        (["preview", "data=[{path: a, weight: x}]"], "right type"),
        (["preview", "data=[3]"], "a dictionary of path"),
        (["preview", "data=rows.jsonl", "target=target", "out=no/where.html"], "no/where.html"),
        (["stats", "data=rows.jsonl", "target=target", "num_anchors=0"], "num_anchors=0"),
        (["stats", "data=rows.jsonl", "target=target", "max_tokens=1"], "data.max_tokens=1"),
        (["stats", "data=rows.jsonl", "target=target", "eval=rows2.jsonl"], "eval='rows2.jsonl'"),
        (["stats", "data=rows.jsonl", "target=target", "eval=ids.jsonl"], "give text, not ids"),
        (["stats", "data=rows.jsonl", "target=target", "eval=bad.jsonl"], "bad.jsonl:1"),
        (["generate", "data=rows.jsonl", "target=target"], "out=''"),
        (["generate", "out=o", "part=1"], "part='1'"),
        (["generate", "out=o", "part=3/2"], "part='3/2'"),
        (["generate", "out=o"], "sampling=[]"),
        (["generate", "out=o", "sampling=[{temprature: 1}]"], "did you mean 'temperature'?"),
        (["generate", "out=o", "sampling=[{temperature: -1}]"], "temperature=-1"),
    ],
)
def test_bad_input_is_one_line(
    target: Path, arguments: list[str], contains: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write(Path("ids.jsonl"), [{"input_ids": [1], "loss_mask": [1]}])
    Path("bad.jsonl").write_text("{\n")
    assert cli.main(["data", *arguments]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("splitserve: ") and contains in line


def test_every_option_is_documented() -> None:
    guide = (Path(__file__).parents[3] / "docs" / "data.md").read_text()
    for options in (commands.PreviewOptions, commands.StatsOptions, commands.GenerateOptions):
        for name in options.__dataclass_fields__:
            assert f"`{name}`" in guide, f"{options.__name__}.{name}"
