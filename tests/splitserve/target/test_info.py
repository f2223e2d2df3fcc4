"""Which targets can run where, and which can lend their layers to a draft."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from splitserve.target.info import (
    TargetInfo,
    check_device,
    check_warm_start,
    check_weights,
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


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda whole: b"", "requires a buffer of 8 bytes"),
        (lambda whole: whole[:4], "requires a buffer of 8 bytes"),
        (lambda whole: whole[:40], "Unterminated|Expecting|delimiter"),
        (lambda whole: whole[:-1], "cut off: it has"),
        (lambda whole: b"version https://git-lfs.github.com/spec/v1\n", "Git LFS"),
        (lambda whole: b"\x02" + b"\0" * 7 + b"[]", "does not list tensors"),
        (lambda whole: b"\xff" * 64, "cannot be read"),
        (None, "No such file"),
    ],
)
def test_weights_that_are_not_all_there_are_refused(tmp_path: Path, spoil: Any, why: str) -> None:
    for name in ("a", "b"):
        save_file({name: torch.zeros(5)}, tmp_path / f"{name}.safetensors")
    index = {"weight_map": {"a": "a.safetensors", "b": "b.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    check_weights(str(tmp_path))
    file = tmp_path / "b.safetensors"
    if spoil is None:
        file.unlink()
    else:
        file.write_bytes(spoil(file.read_bytes()))
    with pytest.raises(ValueError, match=why) as caught:
        check_weights(str(tmp_path))
    message = str(caught.value)
    assert message.startswith("target.path=") and "b.safetensors that cannot be read" in message
