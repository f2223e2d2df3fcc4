"""Which targets can run where, and which can lend their layers to a draft."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from splitserve.errors import UserError
from splitserve.target.info import (
    TargetInfo,
    check_device,
    check_warm_start,
    check_window,
    context_window,
    kda_layers,
)

LING = {"num_hidden_layers": 12, "short_conv_kernel_size": 4, "layer_group_size": 6}
KIMI = {"num_hidden_layers": 4, "linear_attn_config": {"kda_layers": [1, 2, 4]}}
QWEN = {"num_hidden_layers": 4}


def info(config: dict[str, Any]) -> TargetInfo:
    return TargetInfo(
        path="somewhere",
        config=config,
        architecture="BailingMoeV3ForCausalLM",
        num_layers=config["num_hidden_layers"],
        hidden_size=64,
        vocab_size=128,
        eos_token_ids=(2,),
        tokenizer_len=100,
        has_chat_template=True,
        dtype="bfloat16",
    )


@pytest.mark.parametrize(
    ("config", "layers"),
    [
        (LING, (0, 1, 2, 3, 4, 6, 7, 8, 9, 10)),
        (LING | {"layer_group_size": [1, 0] * 6}, (0, 2, 4, 6, 8, 10)),
        (LING | {"layer_group_size": 1}, ()),
        (LING | {"layer_group_size": 0}, ()),
        # Without a short convolution it is an older Bailing, whose linear layers are others.
        (LING | {"short_conv_kernel_size": None}, ()),
        (KIMI, (0, 1, 3)),
        (KIMI | {"linear_attn_config": {}}, ()),
        (QWEN, ()),
        ({}, ()),
    ],
)
def test_kda_layers_follow_from_the_config(config: dict[str, Any], layers: tuple[int, ...]) -> None:
    assert kda_layers(config) == layers


def test_kda_layers_are_refused_on_the_cpu_alone() -> None:
    with pytest.raises(ValueError) as caught:
        check_device(info(LING), "cpu")
    message = str(caught.value)
    assert message.startswith("layout.device='cpu'")
    for part in ("allowed: cuda", "10 of whose 12 layers are KDA", "need a GPU", "layout=gpu1"):
        assert part in message
    check_device(info(LING), "cuda")
    check_device(info(QWEN), "cpu")


@pytest.mark.parametrize("config", [LING, KIMI, QWEN | {"kv_lora_rank": 512}])
def test_layers_of_another_kind_lend_nothing(config: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"draft\.warm_start=True.*set draft\.warm_start=false"):
        check_warm_start(info(config), True)
    check_warm_start(info(config), False)
    check_warm_start(replace(info(config), config=QWEN), True)


def scaled(kind: str, factor: float, **more: Any) -> dict[str, Any]:
    return {"rope_scaling": {"rope_type": kind, "factor": factor, **more}}


@pytest.mark.parametrize(
    ("config", "window"),
    [
        ({}, None),
        ({"max_position_embeddings": None}, None),
        ({"max_position_embeddings": 4096}, 4096),
        ({"max_position_embeddings": 4096, "rope_scaling": None}, 4096),
        ({"max_position_embeddings": 4096, "rope_parameters": {"rope_type": "default"}}, 4096),
        # Extended already: Llama 3.1, Phi 3.
        (
            {"max_position_embeddings": 131072}
            | scaled("llama3", 8.0, original_max_position_embeddings=8192),
            131072,
        ),
        (
            {"max_position_embeddings": 131072, "original_max_position_embeddings": 4096}
            | scaled("longrope", 32.0),
            131072,
        ),
        # As Qwen2.5's model card has YaRN switched on.
        (
            {"max_position_embeddings": 32768}
            | scaled("yarn", 4.0, original_max_position_embeddings=32768),
            131072,
        ),
        # As SGLang counts where nothing says what it was before.
        ({"max_position_embeddings": 4096} | scaled("linear", 4.0), 16384),
        # A kind of rope for each kind of layer.
        (
            {
                "max_position_embeddings": 4096,
                "rope_parameters": {
                    "sliding_attention": {"rope_type": "default"},
                    "full_attention": {"rope_type": "linear", "factor": 8.0},
                },
            },
            32768,
        ),
    ],
)
def test_the_window_follows_from_the_config(config: dict[str, Any], window: int | None) -> None:
    assert context_window(config) == window


def test_sequences_beyond_the_window_are_refused() -> None:
    target = info(QWEN | {"max_position_embeddings": 100})
    check_window(target, "data.max_tokens", 100, 100, "lower it")
    check_window(info(QWEN), "data.max_tokens", 101, 101, "lower it")
    with pytest.raises(UserError, match=r"data\.max_tokens=101.*100 or less.*would have 101"):
        check_window(target, "data.max_tokens", 101, 101, "lower it")
    with pytest.raises(UserError, match=r"eval\.max_new_tokens=64.*: 60 or less.*100.*have 104"):
        check_window(target, "eval.max_new_tokens", 64, 104, "lower it")
    with pytest.raises(UserError, match="nothing with these prompts"):
        check_window(target, "eval.max_new_tokens", 64, 200, "lower it")
