"""Whole runs on conversations that have answers: what was supervised reaches the trainer."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from run_testing import Run
from test_data import conversation, write

from splitserve.compose import compose
from splitserve.run.plan import load_tokenizer, make_plan

Start = Callable[..., Run]
OPTIONS = (
    "data.max_tokens=128",
    "data.held_out_fraction=0.1",
    # More than any conversation has places for, so that every place is an anchor.
    "train.num_anchors=100",
    "eval.every=0",
)


def metrics(run: Run, kind: str) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if row["kind"] == kind]


def num_anchors(tokenizer: Any, messages: list[dict[str, str]]) -> int:
    """Places in a conversation where a token of an answer follows one, its end among them."""
    answers = [m["content"] for m in messages if m["role"] == "assistant"]
    return sum(
        len(tokenizer.encode(f"{a}<|im_end|>", add_special_tokens=False)) - 1 for a in answers
    )


def test_the_trainer_learns_from_every_answer_and_from_nothing_else(
    start_run: Start, tiny_recipe: Path, tiny_target: Path, tmp_path: Path
) -> None:
    """One to three answers a conversation, each of another length: the anchors that the trainers
    counted are those of the schedule's conversations, step by step, also after a resume."""
    given = {f"c{i}": conversation(i, 1 + i % 3) for i in range(24)}
    rows = write(tmp_path / "rows.jsonl", list(given.values()))
    options = [
        *OPTIONS,
        f"data.conversations={rows}",
        "data.prompts=''",
        f"data.cache_dir={tmp_path}/cache",
        "train.replay=0.5",
    ]
    run = start_run("run", *options, "train.steps=4", "layout.train_ranks=2")
    code, output = run.end()
    assert code == 0, output
    assert "22 of 22 to train on" in output
    resumed = Run(tiny_recipe, run.folder, ["resume=true", "train.steps=7"])
    code, output = resumed.end()
    assert code == 0, output
    plan = make_plan(compose([f"recipe={tiny_recipe}", *options, "train.steps=7"]))
    tokenizer = load_tokenizer(str(tiny_target))
    wanted = {}
    for step in range(7):
        names = [name.partition("/")[0] for _, name in plan.schedule.batch(step)]
        counts = [num_anchors(tokenizer, given[name]["messages"]) for name in names]
        wanted[step + 1] = sum(counts)
    assert len(set(wanted.values())) > 3, "steps must differ, or a wrong batch would not show"
    assert {row["step"]: row["num_blocks"] for row in metrics(run, "train")} == wanted
    assert [row["conversations"]["used"] for row in metrics(run, "data")] == [22, 22]
    assert not (run.folder / "responses.jsonl").exists(), "nothing is to be generated"
    assert not metrics(run, "finished")[-1].get("dropped")
    rows.write_text(rows.read_text().replace("five", "six").replace("0 it", "0 so"))
    changed = Run(tiny_recipe, run.folder, ["resume=true", "train.steps=9"])
    code, output = changed.end()
    assert code == 2 and "the digest of the samples that the run began with" in output
