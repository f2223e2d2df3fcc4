from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from chat_templates import FAMILIES
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from splitserve.data import pipeline as pipeline_module
from splitserve.data.leak import MIN_WORDS, NUM_WORDS, LeakIndex
from splitserve.data.length import Document
from splitserve.data.pipeline import BATCH_ROWS, Pipeline, PipelineSettings
from splitserve.data.prepare import leak_index
from splitserve.data.prompts import Prompt
from splitserve.data.refusal import RowRefused
from splitserve.data.render import ChatRenderer
from splitserve.data.sources import RawRow
from splitserve.errors import RunFailed, UserError

ROOT = Path(__file__).parents[3]


def user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def chat(
    question: str = "two plus two", answer: str = "It is four.", **more: Any
) -> dict[str, Any]:
    return {"messages": [user(question), {"role": "assistant", "content": answer}], **more}


def raw(rows: list[Any]) -> list[tuple[RawRow, str]]:
    return [
        (RawRow(f"s:{i}", row if isinstance(row, bytes) else json.dumps(row).encode()), "general")
        for i, row in enumerate(rows)
    ]


@pytest.fixture(scope="module")
def headers() -> PreTrainedTokenizerFast:
    return FAMILIES["headers"].tokenizer()


OUTCOMES: dict[str, Any] = {
    "": chat(),
    "malformed_row": b"{",
    "unknown_role": {"messages": [{"role": "critic", "content": "x"}]},
    "no_answer": {"prompt": "x"},
    "empty_answer": chat(answer=" "),
    "bad_tokens": {"input_ids": [10**6, 1], "loss_mask": [1, 1]},
    "no_anchor": {"input_ids": [1, 2, 3], "loss_mask": [1, 0, 1]},
    "prompt_too_long": chat(question="four " * 90),
}


@settings(max_examples=25, deadline=None)
@given(st.lists(st.sampled_from(list(OUTCOMES)), max_size=40))
def test_every_row_is_used_or_dropped_under_its_reason(outcomes: list[str]) -> None:
    pipeline = Pipeline(FAMILIES["headers"].tokenizer(), PipelineSettings(max_tokens=64))
    documents = list(pipeline.documents(raw([OUTCOMES[o] for o in outcomes])))
    counts = Counter(outcomes)
    report = pipeline.report
    assert [d.id for d in documents] == [f"s:{i}" for i, o in enumerate(outcomes) if not o]
    assert report.num_used == counts.pop("", 0)
    assert report.reasons == counts
    assert report.num_rows == len(outcomes)
    for reason in counts:
        assert report.to_dict()["examples"][reason]["sample_id"] == f"s:{outcomes.index(reason)}"


def as_tuples(documents: list[Document]) -> list[Any]:
    return [
        (d.id, d.domain, d.token_ids.tolist(), d.loss_mask.tolist(), d.num_whole, d.truncated)
        for d in documents
    ]


def test_processes_give_the_same_in_the_same_order(headers: PreTrainedTokenizerFast) -> None:
    rows = [
        chat(f"{i} plus", "four " * (i % 40), domain=f"d{i % 3}") if i % 7 else {"prompt": "x"}
        for i in range(3 * BATCH_ROWS + 5)
    ]
    single = Pipeline(headers, PipelineSettings(max_tokens=48))
    double = Pipeline(headers, PipelineSettings(max_tokens=48, num_workers=2))
    expected = as_tuples(list(single.documents(raw(rows))))
    assert as_tuples(list(double.documents(raw(rows)))) == expected
    assert double.report.to_dict() == single.report.to_dict()
    assert any(truncated for *_, truncated in expected)


def test_rows_are_read_a_few_batches_ahead(headers: PreTrainedTokenizerFast) -> None:
    taken = 0

    def endless() -> Any:
        nonlocal taken
        for row in itertools.cycle(raw([chat()])):
            taken += 1
            yield row

    stream = Pipeline(headers, PipelineSettings()).documents(endless())
    next(stream)
    assert taken == BATCH_ROWS
    stream.close()


def test_limits_stop_before_training(headers: PreTrainedTokenizerFast) -> None:
    rows = raw([chat()] * 8 + [{"prompt": "x"}, b"{"])
    for limits, name in (
        ({"max_zero_mask_fraction": 0.05}, "max_zero_mask_fraction: 1 of 10"),
        ({"max_zero_mask_fraction": 0.1, "max_drop_fraction": 0.1}, "max_drop_fraction: 2 of 10"),
    ):
        pipeline = Pipeline(headers, PipelineSettings(**limits))
        list(pipeline.documents(rows))
        with pytest.raises(ValueError, match=rf"data\.{name}.*no_answer 1 .*s:8"):
            pipeline.check()
    pipeline = Pipeline(headers, PipelineSettings(max_zero_mask_fraction=0.1))
    list(pipeline.documents(rows))
    pipeline.check()


def test_a_template_that_shows_no_answer_stops_with_a_preview() -> None:
    tokenizer = FAMILIES["headers"].tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }} {% endfor %}"
    pipeline = Pipeline(tokenizer, PipelineSettings())
    list(pipeline.documents(raw([chat(answer="four")] * 3)))
    with pytest.raises(ValueError, match=r"all 3 rows.*no_anchor 3.*preview: 'user:"):
        pipeline.check()


@pytest.mark.parametrize(
    ("name", "value"),
    [("max_tokens", 1), ("num_workers", -1), ("max_drop_fraction", 1.1),
     ("max_zero_mask_fraction", -0.1)],
)  # fmt: skip
def test_bad_settings(name: str, value: float) -> None:
    with pytest.raises(UserError, match=rf"data\.{name}={value}"):
        PipelineSettings(**{name: value})


def test_a_worker_that_dies_ends_the_work(
    headers: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline_module, "_start_worker", os._exit)
    monkeypatch.setattr(pipeline_module, "ProcessPoolExecutor", _with_exit)
    pipeline = Pipeline(headers, PipelineSettings(num_workers=1))
    with pytest.raises(RunFailed, match=r"died.*data\.num_workers"):
        list(pipeline.documents(raw([chat()])))


def _with_exit(workers: int, context: Any, start: Any, given: Any) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(workers, context, start, (3,))


# --- leaks ---------------------------------------------------------------------------------------

EVAL = "A farmer has seventeen sheep and buys nine more each month, so how many after a year?"


@pytest.mark.parametrize(
    ("row", "detail"),
    [
        (chat("  A FARMER" + EVAL[8:]), "asks the same as the eval prompt 'e'"),
        (chat("x", f"Let me repeat: {EVAL.lower()} That is 125."), f"{NUM_WORDS} words in a row"),
        (chat("x", "", ), ""),
        (chat("x", EVAL[:40] + " and then something else"), ""),
        (chat("Tell me a joke about sheep please!", "no"), "eval prompt 'f'"),
        (chat("x", "You said: tell me a joke about sheep, please."), "7 words in a row"),
        (chat("x", "So I asked: who are you?"), ""),
        (chat("Who are you?", "me"), "eval prompt 'g'"),
        (chat(EVAL + " And after two?", "x"), ""),
    ],
)  # fmt: skip
def test_leaks(headers: PreTrainedTokenizerFast, row: dict[str, Any], detail: str) -> None:
    short = "Tell me a joke about sheep, please."
    assert len(short.split()) > MIN_WORDS
    index = LeakIndex(
        [
            ("e", [user(EVAL)]),
            ("f", [user(short)]),
            ("g", [user("Who are you?")]),
            ("f2", [user("Tell me a joke about sheep please!")]),
        ]
    )
    pipeline = Pipeline(headers, PipelineSettings(), leaks=index)
    list(pipeline.documents(raw([row])))
    examples = pipeline.report.to_dict()["examples"]
    assert ("eval_leak" in examples) == bool(detail)
    if "eval prompt 'f'" in detail:
        assert "eval prompt 'f2'" in examples["eval_leak"]["detail"]
    elif detail:
        assert detail in examples["eval_leak"]["detail"]


def turns(*texts: str) -> dict[str, Any]:
    roles = itertools.cycle(("user", "assistant"))
    return {"messages": [{"role": r, "content": t} for r, t in zip(roles, texts, strict=False)]}


@pytest.mark.parametrize(
    ("row", "leaks"),
    [
        (turns("Hi", "Hello!", "And two plus two?", "4"), True),
        (turns("hi ", "HELLO!", "and  two plus two?", "5", "thanks", "welcome"), True),
        (turns("Hi", "x"), False),
        (turns("Hi", "Hello!", "What else?", "x"), False),
        (turns("And two plus two?", "x"), False),
        (turns("x", "y", "Tell me a joke about sheep, please.", "z"), True),
    ],
)
def test_a_conversation_leaks_where_it_asks_what_is_measured(
    headers: PreTrainedTokenizerFast, row: dict[str, Any], leaks: bool
) -> None:
    """An eval prompt's own last question, not how it began."""
    index = LeakIndex(
        [
            ("e", turns("Hi", "Hello!", "And two plus two?", "Four")["messages"]),
            ("f", turns("Hi", "Hello!", "Tell me a joke about sheep, please.")["messages"]),
        ]
    )
    pipeline = Pipeline(headers, PipelineSettings(), leaks=index)
    list(pipeline.documents(raw([row])))
    assert pipeline.report.reasons == ({"eval_leak": 1} if leaks else {})


def test_rows_of_tokens_leak_like_others(headers: PreTrainedTokenizerFast) -> None:
    asked = headers.encode("two plus two", add_special_tokens=False)
    said = headers.encode(EVAL, add_special_tokens=False)
    other = headers.encode("four is six", add_special_tokens=False)
    index = LeakIndex([("e", [user(EVAL)])], [("t", asked, "two plus two")])

    def row(question: list[int], answer: list[int]) -> dict[str, Any]:
        mask = [0] * len(question) + [1] * len(answer)
        return {"input_ids": [*question, *answer], "loss_mask": mask}

    pipeline = Pipeline(headers, PipelineSettings(), leaks=index)
    rows = [row(other, asked), row(asked, other), row(other, said), row(said, other)]
    assert [d.id for d in pipeline.documents(raw(rows))] == ["s:0"]
    assert pipeline.report.reasons == {"eval_leak": 3}


def test_answers_of_the_target_leak_what_they_were_asked(
    headers: PreTrainedTokenizerFast,
) -> None:
    """Prompts as messages, rows of tokens as `data generate` writes them, and both as messages."""
    short, long = Prompt("s", "d", (user("two plus two"),)), Prompt("l", "d", (user(EVAL),))
    plain, other = ChatRenderer(headers), ChatRenderer(headers, system_prompt="be brief")
    answer = headers.encode("four is six", add_special_tokens=False)

    def row(renderer: ChatRenderer, text: str) -> dict[str, Any]:
        ids = renderer.prompt_ids([user(text)])
        mask = [0] * len(ids) + [1] * len(answer)
        return {"input_ids": [*ids, *answer], "loss_mask": mask}

    rows = [
        row(plain, "two plus two"),
        row(plain, "two plus two more"),
        row(plain, EVAL),
        # Asked after another system prompt: long questions are known by their text.
        row(other, EVAL),
        row(other, "two plus two"),
        row(other, EVAL[:-7] + "two years?"),
    ]
    pipeline = Pipeline(headers, PipelineSettings(), leaks=leak_index([short, long], plain))
    assert [d.id for d in pipeline.documents(raw(rows))] == ["s:1", "s:4", "s:5"]
    assert pipeline.report.reasons == {"eval_leak": 3}


def test_messages_leak_what_is_measured_as_tokens(headers: PreTrainedTokenizerFast) -> None:
    renderer = ChatRenderer(headers)
    ids = renderer.prompt_ids([user("two plus two")])
    asked = Prompt("t", "d", (), token_ids=ids, held_out=True)
    index = leak_index([asked], renderer)
    assert index is not None
    pipeline = Pipeline(headers, PipelineSettings(), leaks=index)
    rows = [chat("two plus two", "four"), chat("two plus three", "five")]
    assert [d.id for d in pipeline.documents(raw(rows))] == ["s:1"]
    with pytest.raises(RowRefused, match="eval prompt 't'"):
        index.check_prompt_ids(ids)
    index.check_prompt_ids(ids[:-1])


def test_leaks_are_found_in_thoughts_and_by_processes(headers: PreTrainedTokenizerFast) -> None:
    row = chat("x", "y")
    row["messages"][1]["reasoning"] = EVAL
    settings = PipelineSettings(num_workers=1)
    pipeline = Pipeline(headers, settings, leaks=LeakIndex([("e", [user(EVAL)])]))
    assert [d.id for d in pipeline.documents(raw([row, chat()]))] == ["s:1"]
    assert pipeline.report.reasons == {"eval_leak": 1}


def test_a_process_that_tokenizes_does_without_torch() -> None:
    code = (
        "import sys; import splitserve.data.pipeline, splitserve.data.store; "
        "sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False, timeout=100)
    assert done.returncode == 0
