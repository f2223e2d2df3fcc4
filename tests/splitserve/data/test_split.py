from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitserve.data.prompts import Prompt
from splitserve.data.split import check_no_leak, split_prompts


def prompt(name: str, domain: str = "d", text: str = "") -> Prompt:
    return Prompt(name, domain, ({"role": "user", "content": text or f"text of {name}"},))


MANY = [prompt(f"{d}{i}", d) for d, n in (("a", 40), ("b", 20), ("c", 1)) for i in range(n)]


@given(st.randoms(use_true_random=False), st.integers(0, 5))
def test_the_order_of_the_file_does_not_matter(order: random.Random, seed: int) -> None:
    shuffled = list(MANY)
    order.shuffle(shuffled)
    assert split_prompts(shuffled, 0.15, seed) == split_prompts(MANY, 0.15, seed)


def test_every_domain_gives_its_share_and_no_prompt_is_lost() -> None:
    split = split_prompts(MANY, 0.15, seed=1)
    assert Counter(p.domain for p in split.held_out) == {"a": 6, "b": 3}
    assert sorted(p.id for p in split.train + split.held_out) == sorted(p.id for p in MANY)
    assert split != split_prompts(MANY, 0.15, seed=2)


@pytest.mark.parametrize(("fraction", "expected"), [(0.0, 0), (0.01, 1), (0.5, 2), (0.99, 2)])
def test_neither_part_of_a_small_domain_is_empty(fraction: float, expected: int) -> None:
    split = split_prompts([prompt(str(i)) for i in range(3)], fraction, seed=0)
    assert len(split.held_out) == expected


@pytest.mark.parametrize("fraction", [-0.1, 1.0, float("nan")])
def test_fraction_out_of_range(fraction: float) -> None:
    with pytest.raises(ValueError, match=r"data\.held_out_fraction"):
        split_prompts(MANY, fraction, seed=0)


def test_the_same_text_on_both_sides_is_refused() -> None:
    twice = [prompt("one", text="Say hi."), prompt("two", text=" say\nHI. ")]
    with pytest.raises(ValueError, match=r"'(one|two)'.*'(one|two)'.*1 such"):
        split_prompts(twice, 0.5, seed=0)
    with pytest.raises(ValueError, match="trained on"):
        check_no_leak(twice[:1], twice[1:])
    split_prompts(twice, 0.0, seed=0)


def test_a_leak_is_found_whatever_the_answer() -> None:
    answered = Prompt("x", "d", (*prompt("one").messages, {"role": "assistant", "content": "yes"}))
    with pytest.raises(ValueError, match="'x'"):
        check_no_leak([prompt("one")], [answered])
    check_no_leak([prompt("one")], [prompt("two")])
