"""Models that cannot be split over so many GPUs are told so, with the numbers that work."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from test_contract import DRAFT, TARGET
from test_profiles import FP8, LING, folder

from serving.facts import Gpu
from serving.profiles import Profile, Request, build_launch
from serving.split import allowed_deals, allowed_splits, uneven, uneven_experts

HEADS = {"num_attention_heads": 12, "num_key_value_heads": 4, "intermediate_size": 48}
EXPERTS = {"num_experts": 12, "moe_intermediate_size": 96, "intermediate_size": 50}


@pytest.mark.parametrize(
    ("config", "allowed"),
    [
        (HEADS, [1, 2, 4, 12]),
        # One latent head for all.
        ({**HEADS, "kv_lora_rank": 512}, [1, 2, 3, 4, 6, 12]),
        ({**HEADS, "num_key_value_heads": 3}, [1, 3, 6, 12]),
        ({**HEADS, "num_key_value_heads": None}, [1, 2, 3, 4, 6, 12]),
        ({**HEADS, "linear_num_key_heads": 2}, [1, 2]),
        ({**HEADS, "intermediate_size": 50}, [1, 2]),
        # Padded, or of the experts.
        ({**HEADS, "intermediate_size": 50, "quantization_config": {}}, [1, 2, 4, 12]),
        ({**HEADS, **EXPERTS}, [1, 2, 4, 12]),
    ],
)
def test_heads_are_split_evenly(config: dict[str, Any], allowed: list[int]) -> None:
    assert allowed_splits(config) == allowed
    for tp in range(1, 13):
        assert (tp in allowed) == (not uneven(config, tp))
    assert uneven({}, 7) == []


@pytest.mark.parametrize(
    ("tp", "allowed"), [(4, [1, 2, 4]), (8, [1, 2, 4]), (5, []), (6, [1, 2, 3, 6])]
)
def test_experts_are_dealt_out_evenly(tp: int, allowed: list[int]) -> None:
    assert allowed_deals(EXPERTS, tp) == allowed
    assert uneven_experts(EXPERTS, 4, 3) == ["the GPUs"]
    assert uneven_experts(EXPERTS, 8, 8) == ["12 experts"]
    assert uneven_experts(EXPERTS, 5, 1) == ["moe_intermediate_size=96"]


def launched(tmp_path: Path, config: dict[str, Any], **request: Any) -> None:
    path = tmp_path / str(len(list(tmp_path.iterdir())))
    target = folder(path, config, ())
    profile = Profile.DSPARK_STATIC if "draft_path" in request else Profile.PLAIN
    build_launch(Request(profile, target, **{"gpu": Gpu.HOPPER, **request}))


def test_a_server_is_refused_with_the_numbers_that_work(tmp_path: Path) -> None:
    launched(tmp_path, {**TARGET, **HEADS}, tp_size=2)
    wrong = r"tp=3 does not split the target's num_key_value_heads=4 evenly; allowed: 1, 2, 4, 12;"
    with pytest.raises(ValueError, match=wrong):
        launched(tmp_path, {**TARGET, **HEADS}, tp_size=3)
    # One's own argument is what SGLang gets.
    with pytest.raises(ValueError, match="tp=5 does not split"):
        launched(tmp_path, {**TARGET, **HEADS}, arguments={"tp_size": 5})
    nested = {"architectures": TARGET["architectures"], "text_config": {**TARGET, **HEADS}}
    with pytest.raises(ValueError, match="tp=3 does not split the target's"):
        launched(tmp_path, nested, tp_size=3)
    draft = folder(tmp_path / "draft", {**DRAFT, **HEADS, "num_key_value_heads": 3})
    with pytest.raises(ValueError, match=r"tp=4 .* the draft's num_key_value_heads=3"):
        launched(tmp_path, {**TARGET, **HEADS}, draft_path=draft, tp_size=4)
    with pytest.raises(
        ValueError, match=r"ep=3 with tp=4 does not divide the GPUs evenly.*: 1, 2, 4;"
    ):
        launched(tmp_path, {**TARGET, **HEADS, **EXPERTS}, tp_size=4, ep_size=3)


def test_a_multimodal_target_is_split_as_a_flat_one(tmp_path: Path) -> None:
    text = {**TARGET, **HEADS, "intermediate_size": 50}
    nested = {"architectures": TARGET["architectures"], "text_config": text}
    with pytest.raises(ValueError, match="tp=4 does not split the target's intermediate_size=50"):
        launched(tmp_path, nested, tp_size=4)
    # Which is said beside the text_config and not in it.
    quantized = {"quantization_config": {"quant_method": "awq"}}
    launched(tmp_path, {**text, **quantized}, tp_size=4)
    launched(tmp_path, {**nested, **quantized}, tp_size=4)
    # What both levels say counts as the language model has it.
    launched(tmp_path, {**nested, **quantized, "num_attention_heads": 5}, tp_size=4)


def test_what_is_split_otherwise_is_left_to_sglang(tmp_path: Path) -> None:
    config = {**TARGET, **HEADS}
    launched(tmp_path, config, tp_size=3, gpu=Gpu.CPU)
    launched(tmp_path, config, tp_size=6, arguments={"enable_dp_attention": True, "dp_size": 3})
    # A name on a hub whose config.json is not here.
    build_launch(Request(Profile.PLAIN, "some/name", gpu=Gpu.HOPPER, tp_size=7))
    # What fp8 blocks ask for has its own sentence.
    with pytest.raises(ValueError, match="fp8 block of 128") as caught:
        launched(tmp_path, {**LING, **FP8, "num_experts": 8}, tp_size=5)
    assert "does not deal" not in str(caught.value)
