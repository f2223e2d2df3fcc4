"""Anchors and block labels: coverage, determinism, and the alignment of labels."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from dspark.anchors import block_labels, counter_rng, draw_anchors


def mask_of(text: str) -> torch.Tensor:
    return torch.tensor([c == "1" for c in text])


def draw(mask: torch.Tensor, count: int, *, seed=0, epoch=0, sample_id="a") -> list[int]:
    return draw_anchors(mask, count, seed=seed, epoch=epoch, sample_id=sample_id).tolist()


@pytest.mark.parametrize(
    ("mask", "anchors"),
    [
        ("01010", []),
        ("00000", []),
        ("1", []),
        ("11", [0]),
        ("0111011", [1, 2, 5]),
        ("11111", [0, 1, 2, 3]),
    ],
)
def test_anchors_are_where_two_neighbours_are_supervised(mask, anchors):
    assert draw(mask_of(mask), 100) == anchors


def test_fewer_anchors_than_places_are_drawn_without_replacement():
    mask = torch.ones(60, dtype=torch.bool)
    drawn = draw(mask, 12)
    assert len(drawn) == len(set(drawn)) == 12
    assert drawn == sorted(drawn)
    assert drawn[0] >= 0 and drawn[-1] <= 58


def test_every_place_is_drawn_over_the_epochs_and_about_as_often():
    mask = torch.ones(21, dtype=torch.bool)
    counts = torch.zeros(20)
    for epoch in range(400):
        counts[draw(mask, 5, epoch=epoch)] += 1
    # 100 expected; the standard deviation of a fair draw is 9.
    assert counts.min() > 60 and counts.max() < 140


def test_draw_depends_on_seed_epoch_and_sample_alone():
    mask = torch.ones(200, dtype=torch.bool)
    first = draw(mask, 8, seed=1, epoch=2, sample_id="x")
    torch.manual_seed(123)
    torch.rand(7)
    draw(mask, 8, seed=5)
    assert draw(mask, 8, seed=1, epoch=2, sample_id="x") == first
    assert draw(mask, 8, seed=2, epoch=2, sample_id="x") != first
    assert draw(mask, 8, seed=1, epoch=3, sample_id="x") != first
    assert draw(mask, 8, seed=1, epoch=2, sample_id="y") != first


def test_draw_is_the_same_in_every_release():
    """A resumed run must draw what the interrupted one would have."""
    drawn = draw(torch.ones(100, dtype=torch.bool), 6, seed=3, epoch=1, sample_id="s")
    assert drawn == [1, 18, 32, 43, 67, 98]


def test_keys_cannot_run_into_each_other():
    streams = [counter_rng(*key).integers(1 << 62) for key in (("a", 1, 2), ("a", 12), ("a1", 2))]
    assert len(set(streams)) == 3


def test_labels_of_the_worked_example():
    labels, valid = block_labels(
        torch.tensor([10, 11, 12, 13, 14]), mask_of("01101"), torch.tensor([1]), 3
    )
    assert labels.tolist() == [[12, 13, 14]]
    assert valid.tolist() == [[True, False, False]]


def test_labels_end_with_the_sequence():
    tokens = torch.arange(10, 16)
    labels, valid = block_labels(tokens, mask_of("111111"), torch.tensor([2, 4]), 4)
    assert labels.tolist() == [[13, 14, 15, 0], [15, 0, 0, 0]]
    assert valid.tolist() == [[True, True, True, False], [True, False, False, False]]


def test_no_anchor_gives_no_block():
    labels, valid = block_labels(
        torch.arange(4), mask_of("1111"), torch.zeros(0, dtype=torch.int64), 3
    )
    assert labels.shape == valid.shape == (0, 3)


@given(
    mask=st.lists(st.booleans(), min_size=1, max_size=40),
    count=st.integers(1, 12),
    block=st.integers(1, 8),
)
@settings(max_examples=150, deadline=None)
def test_blocks_of_drawn_anchors(mask, count, block):
    supervised = torch.tensor(mask)
    tokens = torch.arange(100, 100 + len(mask))
    anchors = draw_anchors(supervised, count, seed=0, epoch=0, sample_id="h")
    labels, valid = block_labels(tokens, supervised, anchors, block)
    for row, anchor in enumerate(anchors.tolist()):
        run = 0
        while anchor + 1 + run < len(mask) and mask[anchor + 1 + run]:
            run += 1
        assert mask[anchor] and run >= 1
        assert valid[row].tolist() == [g < run for g in range(block)]
        for g in range(min(run, block)):
            assert labels[row, g] == tokens[anchor + 1 + g]
