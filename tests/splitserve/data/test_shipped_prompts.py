"""The prompts that come with the SmolLM2 recipe."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

from splitserve.data.prompts import read_prompts
from splitserve.data.split import split_prompts

PATH = Path(__file__).parents[3] / "recipes" / "smollm2_prompts.jsonl"


def test_file_is_valid_small_and_plain() -> None:
    prompts = read_prompts(PATH)
    assert 380 <= len(prompts) <= 420
    raw = PATH.read_bytes()
    assert raw.isascii()
    assert len(raw) < 100_000
    for prompt in prompts:
        assert [message["role"] for message in prompt.messages] == ["user"]
        assert 4 <= len(prompt.messages[0]["content"].split()) <= 40


def test_every_domain_is_there() -> None:
    counts = Counter(prompt.domain for prompt in read_prompts(PATH))
    assert counts.keys() == {"math", "code", "rewrite", "lists", "facts", "explain"}
    assert min(counts.values()) >= 18 and max(counts.values()) <= 160


def test_prompts_share_their_wording_and_nothing_else() -> None:
    """A prompt of a kind differs from the others in its numbers, its subject or its text."""
    texts = [prompt.messages[0]["content"].lower() for prompt in read_prompts(PATH)]
    assert len(set(texts)) == len(texts)
    # No text to rewrite occurs twice, not even under another instruction.
    rewritten = [
        text.split(": ", 1)[1] for text in texts if text.startswith(("rewrite", "correct"))
    ]
    sentences = [s for text in rewritten for s in re.split(r"(?<=[.]) ", text)]
    assert len(rewritten) == 20 and len(sentences) == len(set(sentences)) == 80


def test_prompts_can_be_split() -> None:
    split = split_prompts(read_prompts(PATH), 0.15, seed=0)
    assert set(Counter(prompt.domain for prompt in split.held_out).values()) <= set(range(3, 25))
