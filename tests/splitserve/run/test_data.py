"""What a run trains on and is measured with, before its first process."""

from __future__ import annotations

import gzip
import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from splitserve.cli import main
from splitserve.compose import compose
from splitserve.data import prompts as prompts_module
from splitserve.data.render import ChatRenderer
from splitserve.errors import UserError
from splitserve.run.data import RunData
from splitserve.run.folder import RunFolder
from splitserve.run.plan import Plan, load_tokenizer, make_plan

TEXT = "it is four and that is all there is to say about two plus two"


def conversation(number: int, turns: int, **more: Any) -> dict[str, Any]:
    """Answers of another length in every turn and in every conversation."""
    roles = itertools.islice(itertools.cycle(("user", "assistant")), 2 * turns)
    messages = [
        {
            "role": role,
            "content": f"{number} {' '.join(TEXT.split()[: 1 + (number + 3 * i) % 9])}",
        }
        for i, role in enumerate(roles)
    ]
    return {"id": f"c{number}", "messages": messages, **more}


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """Twenty conversations of two domains, and two rows that cannot be used."""
    made = [conversation(i, 1 + i % 3, domain=("sums", "words")[i % 2]) for i in range(20)]
    bad = [{"id": "x", "messages": [{"role": "user", "content": "what"}]}, {"nothing": 1}]
    return write(tmp_path / "rows.jsonl", [*made, *bad])


@pytest.fixture
def plan_of(tiny_recipe: Path, tmp_path: Path) -> Any:
    said: list[str] = []

    def plan(*overrides: str, prompts: bool = False) -> Plan:
        given = [f"recipe={tiny_recipe}", "data.max_tokens=128", f"data.cache_dir={tmp_path}/cache"]
        given += [] if prompts else ["data.prompts=''"]
        said.clear()
        return make_plan(
            compose([*given, "data.max_zero_mask_fraction=0.1", *overrides]), tell=said.append
        )

    plan.said = said  # type: ignore[attr-defined]
    return plan


def names(data: RunData) -> set[str]:
    assert data.stored is not None
    return {data.stored.name_of(i) for i in range(len(data.stored))}


def test_conversations_alone_make_a_run(plan_of: Any, rows: Path, tiny_target: Path) -> None:
    plan = plan_of(f"data.conversations={rows}")
    tokenizer = load_tokenizer(str(tiny_target))
    assert plan.data.entries == ()
    held_out = {prompt.prompt_id.partition("/")[0] for prompt in plan.held_out}
    trained = {name.partition("/")[0] for name in names(plan.data)}
    assert held_out | trained == {f"c{i}" for i in range(20)} and not held_out & trained
    assert sorted(p.domain for p in plan.held_out) == ["sums", "sums", "words", "words"]
    assert plan.schedule.num_samples == len(trained) == 16
    for name in names(plan.data):
        sample = plan.data.stored.sample(name)
        said = [tokenizer.decode(sample.token_ids[a:b]) for a, b in sample.supervised]
        given = conversation(int(sample.prompt_id[1:]), 1 + int(sample.prompt_id[1:]) % 3)
        wanted = [m["content"] for m in given["messages"] if m["role"] == "assistant"]
        assert said == [f"{text}<|im_end|>" for text in wanted]
    for prompt in plan.held_out:
        number = int(prompt.prompt_id.partition("/")[0][1:])
        given = conversation(number, 1 + number % 3)["messages"][:-1]
        assert prompt.token_ids == tuple(
            tokenizer.apply_chat_template(given, add_generation_prompt=True, return_dict=False)
        )
    assert any("16 of 18 to train on" in line and "2 dropped" in line for line in plan_of.said)
    accounts = plan.data.accounts
    rows_of = {name: (account["rows"], account["used"]) for name, account in accounts.items()}
    assert rows_of == {"conversations": (18, 16), "measured": (4, 4), "prompts": (0, 0)}
    assert accounts["conversations"]["dropped"] == {"malformed_row": 1, "no_answer": 1}


def test_prompts_and_conversations_share_a_run(plan_of: Any, rows: Path) -> None:
    plan = plan_of(f"data.conversations={rows}", "train.steps=99", prompts=True)
    prompts = {entry.sample_id for entry in plan.data.entries}
    assert len(prompts) == 2 * 20
    epoch = [plan.schedule.sample_at(0, i) for i in range(plan.schedule.num_samples)]
    assert set(epoch) == prompts | names(plan.data) and len(epoch) == len(set(epoch))
    kinds = {prompt.prompt_id[0] for prompt in plan.held_out}
    assert kinds == {"p", "c"}
    assert plan_of(f"data.conversations={rows}", prompts=True).data.digest == plan.data.digest


def test_a_second_run_finds_the_documents(plan_of: Any, rows: Path) -> None:
    first = plan_of(f"data.conversations={rows}")
    assert any("now kept" in line for line in plan_of.said)
    again = plan_of(f"data.conversations={rows}", "train.steps=9", "eval.num_prompts=2")
    assert any("found in" in line for line in plan_of.said)
    assert again.data.digest == first.data.digest and names(again.data) == names(first.data)
    assert again.held_out == first.held_out[:2]
    for override in ("seed=1", "data.held_out_fraction=0.5", "data.last_answer_only=true"):
        other = plan_of(f"data.conversations={rows}", override)
        assert any("now kept" in line for line in plan_of.said), override
        assert other.data.digest != first.data.digest, override
    rows.write_text(rows.read_text().replace("0 it is", "0 it was"))
    assert plan_of(f"data.conversations={rows}").data.digest != first.data.digest


def test_several_sources_stop_together_where_proportions_count(
    plan_of: Any, tmp_path: Path
) -> None:
    write(tmp_path / "a.jsonl", [conversation(i, 1) for i in range(30)])
    write(tmp_path / "b.jsonl", [conversation(100 + i, 2) for i in range(10)])
    both = f"[{{path: {tmp_path}/a.jsonl, domain: one}},{{path: {tmp_path}/b.jsonl, weight: 1}}]"
    for until, size in (("all", 40), ("first", 21)):
        plan = plan_of(f"data.conversations={both}", f"data.until={until}")
        assert len(plan.data.stored) + len(plan.held_out) == size
        assert {prompt.domain for prompt in plan.held_out} == {"one", "general"}


def test_given_eval_prompts_are_looked_for_and_nothing_is_held_out(
    plan_of: Any, rows: Path, tmp_path: Path
) -> None:
    asked = conversation(4, 2)["messages"][:1]
    measured = write(tmp_path / "eval.jsonl", [{"id": "e", "messages": asked}])
    plan = plan_of(f"data.conversations={rows}", f"data.eval_prompts={measured}")
    assert [prompt.prompt_id for prompt in plan.held_out] == ["e"]
    trained = {name.partition("/")[0] for name in names(plan.data)}
    assert trained == {f"c{i}" for i in range(20)} - {"c4"}


def test_prompts_that_are_measured_as_conversations_are_dropped(
    plan_of: Any, rows: Path, tmp_path: Path
) -> None:
    held_out = plan_of(f"data.conversations={rows}").held_out[0].prompt_id
    number = int(held_out.partition("/")[0][1:])
    leaking = {"id": "leak", "messages": conversation(number, 1 + number % 3)["messages"][:-1]}
    clean = [
        {"id": f"p{i}", "messages": [{"role": "user", "content": f"say {i}"}]} for i in range(9)
    ]
    prompts = write(tmp_path / "prompts.jsonl", [*clean, leaking])
    given = (f"data.prompts={prompts}", "data.held_out_fraction=0.2")
    assert "leak/0" in {entry.sample_id for entry in plan_of(*given).data.entries}
    entries = plan_of(f"data.conversations={rows}", *given).data.entries
    assert len(entries) == 2 * 7 and "leak/0" not in {entry.sample_id for entry in entries}


def test_answers_of_the_target_to_what_is_measured_are_dropped(
    plan_of: Any, tiny_target: Path, tmp_path: Path
) -> None:
    """The folder that `data generate` has written for prompts of which some are measured."""
    renderer = ChatRenderer(load_tokenizer(str(tiny_target)))
    asked = [conversation(i, 1)["messages"][:1] for i in range(9)]
    answers = []
    for i, messages in enumerate(asked):
        ids = renderer.prompt_ids(messages)
        for setting in range(2):
            row = {"id": f"p{i}/{setting}", "input_ids": [*ids, 5, 6, 7 + setting, 8]}
            answers.append({**row, "loss_mask": [0] * len(ids) + [1] * 4})
    rows = write(tmp_path / "answers.jsonl", answers)
    measured = write(tmp_path / "eval.jsonl", [{"id": "e", "messages": asked[3]}])
    plan = plan_of(f"data.conversations={rows}", f"data.eval_prompts={measured}")
    kept = {f"p{i}/{setting}" for i in range(9) if i != 3 for setting in range(2)}
    assert {name.rpartition("/c")[0] for name in names(plan.data)} == kept
    # Rows that are held out themselves: nobody else is asked the same.
    prompts = write(
        tmp_path / "prompts.jsonl", [{"id": f"q{i}", "messages": m} for i, m in enumerate(asked)]
    )
    plan = plan_of(f"data.conversations={rows}", f"data.prompts={prompts}")
    held_out = {prompt.token_ids for prompt in plan.held_out}
    assert any(prompt.prompt_id.startswith("p") for prompt in plan.held_out)
    assert plan.data.entries and plan.data.stored
    assert not held_out & {entry.prompt_ids for entry in plan.data.entries}
    trained = {name.partition("/")[0] for name in names(plan.data)}
    questions = {f"p{i}": renderer.prompt_ids(m) for i, m in enumerate(asked)}
    assert not held_out & {questions[name] for name in trained}


def test_rows_of_tokens_are_samples_and_questions(plan_of: Any, tmp_path: Path) -> None:
    mask = [0, 1, 1, 0, 0, *[1] * 6]
    given = [
        {"id": f"t{i}", "input_ids": [20 + i, *range(30, 40)], "loss_mask": mask} for i in range(10)
    ]
    plan = plan_of(f"data.conversations={write(tmp_path / 'tokens.jsonl', given)}")
    assert len(plan.data.stored) == 8
    for name in names(plan.data):
        sample = plan.data.stored.sample(name)
        assert sample.token_ids == (20 + int(sample.prompt_id[1:]), *range(30, 40))
        assert sample.supervised == ((1, 3), (5, 11))
    for prompt in plan.held_out:
        assert prompt.token_ids[1:] == (30, 31, 32, 33)


def test_a_mask_token_that_conversations_use_is_refused(
    plan_of: Any, tmp_path: Path, tiny_target: Path
) -> None:
    unused = load_tokenizer(str(tiny_target)).convert_tokens_to_ids("<unused_b>")
    given = [
        {"id": f"t{i}", "input_ids": [20 + i, 30, 31, unused], "loss_mask": [0, 1, 1, 1]}
        for i in range(10)
    ]
    path = write(tmp_path / "tokens.jsonl", given)
    with pytest.raises(ValueError, match=r"draft\.mask_token.*it occurs in the data"):
        plan_of(f"data.conversations={path}", "draft.mask_token='<unused_b>'")
    assert plan_of(f"data.conversations={path}").draft.mask_token_id != unused


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["data.max_zero_mask_fraction=0.01"], r"data\.max_zero_mask_fraction: 1 of 18.*no_answer"),
        (["data.max_drop_fraction=0.1"], r"data\.max_drop_fraction: 2 of 18.*malformed_row"),
        (["data.max_tokens=8"], r"data\.conversations: all 18 rows.*prompt_too_long"),
    ],
)
def test_a_run_that_loses_too_much_does_not_start(
    plan_of: Any, rows: Path, options: list[str], message: str
) -> None:
    for _ in range(2):  # Made now, and found.
        with pytest.raises(ValueError, match=message):
            plan_of(f"data.conversations={rows}", "draft.block_size=2", *options)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("nowhere.jsonl", r"data\.conversations='nowhere\.jsonl'.*check the path"),
        ("[{paths: a.jsonl}]", r"data\.conversations=.*path, weight, domain"),
        ("[{path: a.jsonl, weight: 0}]", r"data\.weight=0"),
        ("3", r"data\.conversations="),
    ],
)
def test_a_source_that_is_not_one_is_refused_at_once(
    plan_of: Any, given: str, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        plan_of(f"data.conversations={given}", "target.path=nowhere")


def test_questions_that_leave_no_room_are_not_measured(plan_of: Any, tmp_path: Path) -> None:
    made = [conversation(i, 9 if i % 2 else 1) for i in range(20)]
    path = write(tmp_path / "rows.jsonl", made)
    plan = plan_of(f"data.conversations={path}", "data.max_drop_fraction=0.9")
    assert plan.held_out and all(len(p.token_ids) < 128 for p in plan.held_out)
    assert all(int(p.prompt_id.partition("/")[0][1:]) % 2 == 0 for p in plan.held_out)


def test_the_plan_command_counts_them(
    plan_of: Any,
    rows: Path,
    tiny_recipe: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    options = [f"data.conversations={rows}", "data.prompts=''", "data.max_tokens=128"]
    options += [f"data.cache_dir={tmp_path}/cache", "data.max_zero_mask_fraction=0.1"]
    assert main(["plan", f"recipe={tiny_recipe}", *options]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "16 of 18 to train on" in said and "16 samples, 4 steps of 4 samples; 4 held-out" in said


def test_nothing_is_left_behind_by_a_source_that_breaks_off(plan_of: Any, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl.gz"
    text = "".join(json.dumps(conversation(i, 1)) + "\n" for i in range(2000))
    path.write_bytes(gzip.compress(text.encode())[:-2000])
    for _ in range(2):
        with pytest.raises(UserError, match=r"rows\.jsonl\.gz.*it fails after line"):
            plan_of(f"data.conversations={path}")
    assert list((tmp_path / "cache").iterdir()) == []


def test_more_prompts_than_memory_holds_are_refused(
    plan_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompts_module, "MOST_PROMPTS", 20)
    with pytest.raises(UserError, match=r"data\.prompts=.*at most 20 prompts.*data generate"):
        plan_of(prompts=True)


def test_a_run_goes_on_with_the_samples_that_it_began_with(tmp_path: Path) -> None:
    folder = RunFolder.create(str(tmp_path / "run"), "tiny", resume=False)
    folder.keep_digest("abc")
    folder.keep_digest("abc")
    with pytest.raises(UserError, match="abc, the digest of the samples"):
        folder.keep_digest("abd")
