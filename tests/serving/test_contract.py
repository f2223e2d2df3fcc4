"""Each way in which a draft's config.json can fail SGLang is found, and named alone."""

from __future__ import annotations

from typing import Any

import pytest

from serving.contract import contract_problems

TARGET = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "vocab_size": 1000,
    "num_hidden_layers": 8,
    "max_position_embeddings": 2048,
}
DRAFT = {
    "architectures": ["Qwen3DSparkModel"],
    "markov_rank": 16,
    "markov_head_type": "vanilla",
    "block_size": 5,
    "hidden_size": 64,
    "vocab_size": 1000,
    "mask_token_id": 999,
    "target_layer_ids": [0, 3, 6],
    "max_position_embeddings": 2048,
    "dtype": "bfloat16",
}


def test_a_good_draft_has_no_problem() -> None:
    assert contract_problems(DRAFT, TARGET) == []


def test_the_older_name_of_the_type_is_read_too() -> None:
    draft = {k: v for k, v in DRAFT.items() if k != "dtype"}
    assert contract_problems({**draft, "torch_dtype": "bfloat16"}, TARGET) == []


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("architectures", None),
        ("architectures", ["LlamaForCausalLM"]),
        ("markov_rank", None),
        ("markov_rank", 0),
        ("markov_rank", "16"),
        ("markov_head_type", "lstm"),
        ("markov_head_type", None),
        ("block_size", None),
        ("block_size", 0),
        ("hidden_size", 128),
        ("vocab_size", 1001),
        ("mask_token_id", None),
        ("mask_token_id", -1),
        ("mask_token_id", 1000),
        ("target_layer_ids", None),
        ("target_layer_ids", []),
        ("target_layer_ids", [3, 0, 7]),
        ("target_layer_ids", [0, 3, 3]),
        ("target_layer_ids", [-1, 3]),
        ("target_layer_ids", [0, 8]),
        ("target_layer_ids", [0, 7]),
        ("max_position_embeddings", 1024),
        ("max_position_embeddings", None),
        ("dtype", "float32"),
        ("dtype", None),
    ],
)
def test_each_problem_is_named(name: str, value: Any) -> None:
    problems = contract_problems({**DRAFT, name: value}, TARGET)
    assert len(problems) == 1
    assert name in problems[0]


def test_the_last_layer_is_taken_where_sglang_captures_after_a_layer() -> None:
    ling = {**TARGET, "architectures": ["BailingMoeV3ForCausalLM"]}
    assert contract_problems({**DRAFT, "target_layer_ids": [0, 7]}, ling) == []
    assert len(contract_problems({**DRAFT, "target_layer_ids": [0, 8]}, ling)) == 1


def test_a_mask_token_may_lie_in_the_padding_of_the_embeddings() -> None:
    draft = {**DRAFT, "mask_token_id": 1020}
    assert len(contract_problems(draft, TARGET)) == 1
    assert contract_problems(draft, {**TARGET, "padded_vocab_size": 1024}) == []


def test_sizes_of_a_wrapped_target_are_found() -> None:
    sizes = {k: v for k, v in TARGET.items() if k != "architectures"}
    wrapped = {"architectures": ["Qwen3VLForConditionalGeneration"], "text_config": sizes}
    assert contract_problems(DRAFT, wrapped) == []
    assert len(contract_problems({**DRAFT, "hidden_size": 128}, wrapped)) == 1


def test_the_length_that_counts_is_the_one_served() -> None:
    assert contract_problems({**DRAFT, "max_position_embeddings": 1024}, TARGET, 1024) == []
    assert len(contract_problems(DRAFT, TARGET, 4096)) == 1


def test_every_problem_is_listed() -> None:
    assert len(contract_problems({}, TARGET)) == len(DRAFT)
