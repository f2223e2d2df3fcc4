"""The prompts that come with the SmolLM2 recipe."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from pathlib import Path

from splitserve.data.prompts import read_prompts
from splitserve.data.split import split_prompts

PATH = Path(__file__).parents[3] / "recipes" / "smollm2_prompts.jsonl"


def five_grams(text: str) -> set[tuple[str, ...]]:
    words = re.findall(r"[a-z]+|#", re.sub(r"\d+", "#", text.lower()))
    return {tuple(words[i : i + 5]) for i in range(max(1, len(words) - 4))}


def test_file_is_valid_small_and_plain() -> None:
    prompts = read_prompts(PATH)
    assert 380 <= len(prompts) <= 420
    raw = PATH.read_bytes()
    assert raw.isascii()
    assert len(raw) < 100_000
    for prompt in prompts:
        assert [message["role"] for message in prompt.messages] == ["user"]
        assert 4 <= len(prompt.messages[0]["content"].split()) <= 40


def test_domains_are_balanced() -> None:
    counts = Counter(prompt.domain for prompt in read_prompts(PATH))
    assert counts.keys() == {"math", "code", "rewrite", "lists", "facts", "explain"}
    assert max(counts.values()) - min(counts.values()) <= 10


def test_no_two_prompts_are_nearly_the_same() -> None:
    texts = [prompt.messages[0]["content"] for prompt in read_prompts(PATH)]
    for (a, grams_a), (b, grams_b) in itertools.combinations(
        [(text, five_grams(text)) for text in texts], 2
    ):
        assert len(grams_a & grams_b) < 0.5 * len(grams_a | grams_b), (a, b)


def test_prompts_can_be_split() -> None:
    split = split_prompts(read_prompts(PATH), 0.15, seed=0)
    assert set(Counter(prompt.domain for prompt in split.held_out).values()) == {10}
