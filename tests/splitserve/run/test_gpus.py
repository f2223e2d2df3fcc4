"""Where the halves lie, what each GPU will hold, and what is refused before anything starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dspark.config import DraftConfig
from splitserve.compose import compose
from splitserve.errors import UserError
from splitserve.run.gpus import Gpu, place
from splitserve.run.memory import (
    GIB,
    GpuNeeds,
    check_memory,
    kv_token_bytes,
    memory_fraction,
    needs,
    num_parameters,
)
from splitserve.settings import LayoutSettings, RunSettings

MACHINE = [Gpu(name, "Test GPU", 100 * GIB) for name in ("4", "5", "6", "7")]
QWEN3_8B = {
    "num_hidden_layers": 36,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
}


def gpu_settings(tmp_path: Path, *changes: str) -> RunSettings:
    prompts = tmp_path / "p.jsonl"
    prompts.write_text("")
    return compose(["recipe=smollm2_gpu", f"data.prompts={prompts}", *changes])


def draft_of(target: dict[str, Any]) -> DraftConfig:
    return DraftConfig.for_target(
        target, num_layers=5, block_size=7, mask_token_id=5, markov_rank=256
    )


def test_gpus_are_taken_by_their_place_and_named_as_the_machine_does() -> None:
    placement = place(LayoutSettings(device="cuda", target=[0, 1], train=[3, 2]), MACHINE)
    assert placement.target_names == ("4", "5")
    assert placement.engine_environment(0) == {"CUDA_VISIBLE_DEVICES": "4,5"}
    assert placement.trainer_environment(0) == {"CUDA_VISIBLE_DEVICES": "7,4,5"}
    assert placement.trainer_environment(1) == {"CUDA_VISIBLE_DEVICES": "6,4,5"}


def test_every_engine_sees_its_own_gpus_and_the_one_where_drafts_lie() -> None:
    layout = LayoutSettings(device="cuda", target=[3, 1, 2, 0], engines=2, train=[0])
    placement = place(layout, MACHINE)
    assert placement.tp_size == 2
    assert placement.groups == (("7", "5"), ("6", "4"))
    assert placement.engine_environment(0) == {"CUDA_VISIBLE_DEVICES": "7,5"}
    assert placement.engine_environment(1) == {"CUDA_VISIBLE_DEVICES": "6,4,7"}


def test_a_shared_gpu_is_named_once() -> None:
    placement = place(LayoutSettings(device="cuda", target=[0], train=[0]), MACHINE)
    assert placement.trainer_environment(0) == {"CUDA_VISIBLE_DEVICES": "4"}


def test_the_cpu_needs_no_gpu() -> None:
    placement = place(LayoutSettings(), [])
    assert placement.engine_environment(0) == placement.trainer_environment(0) == {}


@pytest.mark.parametrize(
    ("machine", "allowed"), [([], "torch sees no GPU here"), (MACHINE[:2], "0 to 1")]
)
def test_a_gpu_that_is_not_there_is_refused(machine: list[Gpu], allowed: str) -> None:
    with pytest.raises(UserError) as caught:
        place(LayoutSettings(device="cuda", target=[0], train=[4]), machine)
    assert caught.value.field in ("layout.target", "layout.train")
    assert allowed in str(caught.value)


def test_the_cache_of_one_token() -> None:
    assert kv_token_bytes(QWEN3_8B) == 2 * 2 * 36 * 8 * 128
    latent = {"num_hidden_layers": 42, "layer_group_size": 6, "kv_lora_rank": 512}
    assert kv_token_bytes({**latent, "qk_rope_head_dim": 64}) == 2 * 7 * 576


def test_a_half_on_its_own_gpus_is_counted_there(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"\0" * 4096)
    settings = gpu_settings(tmp_path, "layout=gpu4p4", "layout.target=[0,1]", "layout.train=[2,3]")
    placement = place(settings.layout, MACHINE)
    draft = draft_of(QWEN3_8B)
    found = needs(settings, placement, QWEN3_8B, str(tmp_path), draft, 49152)
    assert [e.gpu.name for e in found] == ["4", "5", "6", "7"]
    first, second, trainer, _ = found
    assert not first.train and not trainer.target
    assert first.target["target weights"] == 2048
    assert set(first.target) - set(second.target) == {"draft exchange"}
    assert first.target["contexts of readers"] == 3 * GIB // 2
    assert trainer.train["optimizer"] == 12 * num_parameters(draft) // 2
    assert trainer.train["target embedding and lm_head"] == 2 * 2 * 151936 * 4096


def test_a_shared_gpu_holds_both_and_sglang_is_told_so(tmp_path: Path) -> None:
    settings = gpu_settings(tmp_path, "engine.max_running_requests=64")
    placement = place(settings.layout, MACHINE)
    (entry,) = needs(settings, placement, QWEN3_8B, str(tmp_path), draft_of(QWEN3_8B), 49152)
    assert entry.target and entry.train
    fraction = memory_fraction(settings, [entry])
    assert entry.num_bytes / entry.gpu.num_bytes < fraction <= 0.92


def test_the_engine_s_share_can_be_set(tmp_path: Path) -> None:
    settings = gpu_settings(tmp_path, "engine.memory_fraction=0.5")
    assert memory_fraction(settings, [GpuNeeds(MACHINE[0], target={"ring": GIB})]) == 0.5
    assert memory_fraction(gpu_settings(tmp_path), []) == 0.0


def test_what_does_not_fit_is_refused_by_its_largest_part() -> None:
    full = GpuNeeds(MACHINE[0], ["target rank 0"], {"ring": 80 * GIB, "target weights": 15 * GIB})
    with pytest.raises(UserError) as caught:
        check_memory([full])
    assert "GPU 4" in str(caught.value) and "ring (80.0 GiB)" in str(caught.value)
    check_memory([GpuNeeds(MACHINE[0], ["target rank 0"], {"ring": 80 * GIB})])


@pytest.mark.parametrize(
    ("changes", "speculates"),
    [
        ((), True),
        (("engine.speculate=off",), False),
        (("draft=dflash_small",), False),
    ],
)
def test_when_the_engine_speculates(
    tmp_path: Path, changes: tuple[str, ...], speculates: bool
) -> None:
    assert gpu_settings(tmp_path, *changes).speculates is speculates


def test_speculating_where_sglang_cannot_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"engine\.speculate"):
        gpu_settings(tmp_path, "draft=dflash_small", "engine.speculate=on")
