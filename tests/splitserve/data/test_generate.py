from __future__ import annotations

import json
from collections import Counter, deque
from pathlib import Path
from typing import Any

import pytest
import torch
from chat_tokenizer import build_tokenizer
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from splitserve import cli
from splitserve.data.conversation import TokenRow, parse_row
from splitserve.data.generate import GenerateCounts, Part, PartFile, generate
from splitserve.data.length import Document
from splitserve.data.pipeline import Pipeline, PipelineSettings
from splitserve.data.render import ChatRenderer
from splitserve.data.samples import make_sample, sample_of
from splitserve.data.sources import RawRow
from splitserve.errors import RunFailed, UserError
from splitserve.messages import (
    EngineReady,
    Fatal,
    Generate,
    Generated,
    Rejected,
    Stop,
)
from splitserve.settings import SamplingSettings

SETTINGS = (
    SamplingSettings(0.0, max_new_tokens=8),
    SamplingSettings(0.8, 0.9, max_new_tokens=8),
)
END = 2


class FakeEngine:
    """Answers two tokens and the end of the turn, in an order of its own."""

    def __init__(self, die_after: int = 10**9, reject: int = 0, silent: float = 0.0) -> None:
        self.asked: list[Generate] = []
        self.stopped = False
        self._out: deque[Any] = deque([EngineReady()])
        self._die_after, self._reject, self._silent = die_after, reject, silent
        self._answers = 0

    def send(self, message: Any) -> None:
        if isinstance(message, Stop):
            self.stopped = True
            return
        self.asked.append(message)
        if self._reject:
            self._reject -= 1
            self._out.append(Rejected(message.request_id, None, "engine_error: x"))
        else:
            answer = (40, 41, END)
            self._out.appendleft(Generated(message.request_id, answer, "stop"))

    def receive(self) -> list[Any]:
        if self._answers >= self._die_after:
            return []
        found = [self._out.popleft() for _ in range(min(2, len(self._out)))]
        self._answers += sum(isinstance(m, Generated) for m in found)
        return found

    def exit_code(self) -> int | None:
        return 9 if self._answers >= self._die_after else None

    def silent_seconds(self) -> float:
        return self._silent

    def log_tail(self) -> str:
        return "the last line"


def prompts(count: int) -> list[tuple[RawRow, str]]:
    return [
        (RawRow(f"s:{i}", {"id": f"p{i}", "prompt": f"What is {i}?"}), "d") for i in range(count)
    ]


def run(
    folder: Path,
    engine: FakeEngine,
    rows: list[tuple[RawRow, str]],
    part: Part = Part(),  # noqa: B008 - frozen
    **changes: Any,
) -> GenerateCounts:
    out = PartFile(folder, part, {"seed": 0, **changes.pop("description", {})})
    given = {
        "max_tokens": 64,
        "end_of_turn_ids": (END,),
        "seed": 0,
        "max_in_flight": 3,
        "start_timeout_seconds": 5.0,
        "heartbeat_timeout_seconds": 5.0,
        **changes,
    }
    try:
        return generate(
            iter(rows), ChatRenderer(build_tokenizer()), SETTINGS, engine, out, part, **given
        )
    finally:
        out.close()


def rows_of(folder: Path) -> list[dict[str, Any]]:
    lines = [p.read_text().splitlines() for p in sorted(folder.glob("part-*.jsonl"))]
    return [json.loads(line) for part in lines for line in part]


def test_every_prompt_under_every_setting_once(tmp_path: Path) -> None:
    engine = FakeEngine()
    counts = run(tmp_path, engine, prompts(5))
    rows = rows_of(tmp_path)
    assert Counter(row["id"] for row in rows) == {f"p{i}/{k}": 1 for i in range(5) for k in (0, 1)}
    assert (counts.written, counts.tokens, counts.finished) == (10, 30, {"stop": 10})
    assert engine.stopped
    prompt = ChatRenderer(build_tokenizer()).prompt_ids([{"role": "user", "content": "What is 3?"}])
    row = next(row for row in rows if row["id"] == "p3/1")
    parsed = parse_row(row, "x", "y")
    assert isinstance(parsed, TokenRow)
    assert tuple(parsed.token_ids) == (*prompt, 40, 41, END)
    assert parsed.loss_mask.sum() == 3 and parsed.loss_mask[-3:].all()
    # What a run trains on is the same, answered in the run or read from here.
    document = Pipeline(build_tokenizer(), PipelineSettings()).one(RawRow("x", row), "y")
    assert isinstance(document, Document)
    online = make_sample(
        "p3/1", "p3", row["domain"], prompt, (40, 41, END), max_tokens=2048, end_of_turn_ids={END}
    )
    assert sample_of(document, "p3/1", "p3") == online
    assert (row["prompt_id"], row["setting"], row["temperature"], row["top_p"]) == (
        "p3",
        1,
        0.8,
        0.9,
    )
    seeds = {r["seed"] for r in rows}
    assert len(seeds) == 10 and {g.sampling.seed for g in engine.asked} == seeds


def test_what_is_there_is_not_asked_again(tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match=r"ended with code 9; start again.*the last line"):
        run(tmp_path, FakeEngine(die_after=4), prompts(5))
    (file,) = tmp_path.glob("part-*.jsonl")
    with open(file, "ab") as out:
        out.write(b'{"id": "p4/1", "cut off by a cr')
    before = [row for row in file.read_text().splitlines() if row.endswith("}")]
    engine = FakeEngine()
    counts = run(tmp_path, engine, prompts(5))
    assert counts.found == len(before) > 0
    assert len(engine.asked) == 10 - len(before)
    assert file.read_text().splitlines()[: len(before)] == before
    assert Counter(r["id"] for r in rows_of(tmp_path)) == {
        f"p{i}/{k}": 1 for i in range(5) for k in (0, 1)
    }
    again = FakeEngine()
    assert run(tmp_path, again, prompts(5)).found == 10
    assert again.asked == []


def test_a_prompt_that_comes_twice_is_answered_once(tmp_path: Path) -> None:
    run(tmp_path, FakeEngine(), prompts(3) + prompts(3))
    assert len(rows_of(tmp_path)) == 6


def test_parts_meet_in_no_prompt_and_leave_none_out(tmp_path: Path) -> None:
    for number in range(3):
        run(tmp_path, FakeEngine(), prompts(30), Part(number, 3))
    files = sorted(tmp_path.glob("part-*.jsonl"))
    assert [f.name for f in files] == [f"part-0000{k}-of-00003.jsonl" for k in range(3)]
    assert all(f.stat().st_size for f in files)
    assert Counter(row["id"] for row in rows_of(tmp_path)) == {
        f"p{i}/{k}": 1 for i in range(30) for k in (0, 1)
    }


def test_drops_are_kept_with_their_reason_and_not_tried_again(tmp_path: Path) -> None:
    rows = [
        (RawRow("s:0", {"prompt": "four " * 90}), "d"),
        (RawRow("s:1", b"{"), "d"),
        (RawRow("s:2", {"input_ids": [1], "loss_mask": [1]}), "d"),
        (RawRow("s:3", {"messages": [{"role": "user", "content": "x"},
                                      {"role": "assistant", "content": "old"}]}), "d"),
    ]  # fmt: skip
    counts = run(tmp_path, FakeEngine(), rows)
    assert counts.dropped == {"prompt_too_long": 1, "malformed_row": 1, "not_a_prompt": 1}
    assert [row["id"] for row in rows_of(tmp_path)] == ["s:3/1", "s:3/0"]
    (drops,) = tmp_path.glob("*.drops")
    assert {json.loads(line)["id"] for line in drops.read_text().splitlines()} == {
        "s:0/prompt", "s:1/prompt", "s:2/prompt"
    }  # fmt: skip
    assert run(tmp_path, FakeEngine(), rows).dropped == {}
    assert len(drops.read_text().splitlines()) == 3


def test_an_answer_that_cannot_be_trained_on_is_a_drop(tmp_path: Path) -> None:
    class Mute(FakeEngine):
        def send(self, message: Any) -> None:
            super().send(message)
            if isinstance(message, Generate):
                self._out[0] = Generated(message.request_id, (END,), "stop")

    counts = run(tmp_path, Mute(), prompts(1))
    assert counts.dropped == {"no_anchor": 2} and rows_of(tmp_path) == []
    again = FakeEngine()
    run(tmp_path, again, prompts(1))
    assert again.asked == []


def test_failed_requests_are_tried_again(tmp_path: Path) -> None:
    engine = FakeEngine(reject=2)
    assert run(tmp_path, engine, prompts(1)).failed == 0
    assert len(rows_of(tmp_path)) == 2
    never = FakeEngine(reject=10**9)
    assert run(tmp_path / "b", never, prompts(1)).failed == 2
    assert len(never.asked) == 6
    assert run(tmp_path / "b", FakeEngine(), prompts(1)).written == 2


def test_every_wait_has_a_bound(tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match="no sign of life for 5 seconds"):
        run(tmp_path, FakeEngine(silent=6.0), prompts(1))
    late = FakeEngine()
    late._out.clear()
    with pytest.raises(RunFailed, match=r"not started within 0\.05 seconds"):
        run(tmp_path, late, prompts(1), start_timeout_seconds=0.05)
    fatal = FakeEngine()
    fatal._out.appendleft(Fatal("no memory"))
    with pytest.raises(RunFailed, match="cannot go on: no memory"):
        run(tmp_path, fatal, prompts(1))


def test_folders_of_other_answers_are_refused(tmp_path: Path) -> None:
    run(tmp_path, FakeEngine(), prompts(1))
    with pytest.raises(UserError, match=r"out=.*same seed, or a new one"):
        run(tmp_path, FakeEngine(), prompts(1), description={"seed": 1})
    with pytest.raises(UserError, match=r"same parts"):
        run(tmp_path, FakeEngine(), prompts(1), Part(0, 2))
    held = PartFile(tmp_path, Part(), {"seed": 0})
    with pytest.raises(UserError, match=r"part='0/1'.*no other process"):
        PartFile(tmp_path, Part(), {"seed": 0})
    held.close()
    (file,) = tmp_path.glob("part-*.jsonl")
    file.write_text("[]\n" + file.read_text())
    with pytest.raises(UserError, match=r"line 1 is none"):
        PartFile(tmp_path, Part(), {"seed": 0})
    with pytest.raises(UserError, match=r"part='2/2'"):
        Part(2, 2)


@pytest.fixture(scope="module")
def tiny_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    tokenizer: PreTrainedTokenizerFast = build_tokenizer()
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=256,
        eos_token_id=tokenizer.eos_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def test_the_command_has_a_target_answer_and_goes_on(
    tiny_target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "p.txt").write_text("one\ntwo\nthree\n")
    command = [
        "data", "generate", f"target={tiny_target}", f"data={tmp_path / 'p.txt'}",
        f"out={tmp_path / 'out'}", "engine=transformers", "dtype=float32", "max_tokens=80",
        "sampling=[{temperature: 0, max_new_tokens: 6}, {temperature: 1.0, max_new_tokens: 4}]",
    ]  # fmt: skip
    assert cli.main(command) == 0
    rows = rows_of(tmp_path / "out")
    assert len(rows) == 6
    for row in rows:
        assert sum(row["loss_mask"]) <= 6 - 2 * row["setting"]
    capsys.readouterr()
    # The answers are data like any other, and the folder is a source.
    assert cli.main(["data", "stats", f"target={tiny_target}", "cache=false",
                     f"data={tmp_path / 'out'}"]) == 0  # fmt: skip
    assert "documents                      6" in capsys.readouterr().out
