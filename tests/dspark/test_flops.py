"""Operations of a training step, counted by hand."""

from __future__ import annotations

from dataclasses import replace

import torch

from dspark.batch import TrainingSample, lay_out
from dspark.config import DraftConfig
from dspark.flops import StepSize, necessary_flops

CONFIG = DraftConfig.for_target(
    {
        "vocab_size": 50,
        "hidden_size": 8,
        "intermediate_size": 12,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 6,
        "max_position_embeddings": 64,
    },
    num_layers=2,
    block_size=3,
    mask_token_id=49,
    markov_rank=5,
    num_context_layers=3,
)


def sample(name: str, length: int, supervised: list[int]) -> TrainingSample:
    mask = torch.zeros(length, dtype=torch.bool)
    mask[supervised] = True
    return TrainingSample(name, 0, torch.arange(length), mask)


def test_a_packed_row_counts_what_is_there() -> None:
    # Two tokens are supervised in each document: an anchor, and one label behind it.
    samples = [sample("a", 9, [5, 6]), sample("b", 7, [3, 4])]
    layout = lay_out(samples, num_anchors=4, block_size=3, seed=0, row_tokens=32, max_documents=3)
    # Three rows each, of 5 and of 3 tokens of context and the block itself.
    pairs = 3 * (5 + 3) + 3 * (3 + 3)
    assert StepSize.of(layout, 16) == StepSize(16, 6, pairs, 2)


def test_a_row_of_padding_costs_nothing_but_its_context() -> None:
    layout = lay_out([], num_anchors=2, block_size=3, seed=0, row_tokens=8, max_documents=1)
    assert StepSize.of(layout, 0) == StepSize(0, 0, 0, 0)
    assert sum(necessary_flops(CONFIG, StepSize(0, 0, 0, 0)).values()) == 0.0


def test_every_part_by_hand() -> None:
    size = StepSize(num_tokens=10, num_rows=6, num_pairs=40, num_targets=4)
    found = necessary_flops(CONFIG, size)
    # Features of three layers of 8 become 8: forward, and the gradient of the weights.
    assert found["fc"] == 2 * (2 * 10 * 24 * 8)
    # Keys and values of two heads of 2 each: forward and both gradients, in two layers.
    assert found["context_kv"] == 2 * 3 * (2 * 10 * 8 * 8)
    attention, mlp = 8 * 8 * 2 + 8 * 4 * 2, 3 * 8 * 12
    assert found["layers"] == 2 * 3 * 2 * 6 * (attention + mlp)
    assert found["attention"] == 2 * 7 * (2 * 40 * 8)
    # The draft's logits forward and back, the target's forward, Markov's three.
    assert found["vocabulary"] == 2 * 50 * 8 * (6 + 6 + 4) + 3 * 2 * 6 * 5 * 50
    plain = necessary_flops(replace(CONFIG, markov_rank=0, confidence_head_with_markov=False), size)
    assert plain["vocabulary"] == 2 * 50 * 8 * 16
