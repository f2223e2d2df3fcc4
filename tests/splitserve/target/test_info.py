"""Which targets can run where, and which can lend their layers to a draft."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from splitserve.target.info import TargetInfo, check_device, check_warm_start, kda_layers

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
