"""The recipes for large targets: what they plan, on targets of the same kind that fit here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from serving.contract import contract_problems
from splitserve.compose import compose
from splitserve.errors import UserError
from splitserve.run.plan import draft_config, make_plan, target_of
from splitserve.settings import RunSettings
from splitserve.target.info import TargetInfo
from splitserve.transport.layout import RingLayout

MASK_TOKEN = 300
ON_CPU = ("layout=cpu", "engine=sglang_cpu")


@pytest.fixture
def prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A file of prompts, and a cache folder of this test's own."""
    monkeypatch.setenv("SPLITSERVE_CACHE", str(tmp_path / "cache"))
    rows = (
        {"id": f"p{i}", "messages": [{"role": "user", "content": f"What is {i} plus two?"}]}
        for i in range(60)
    )
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(json.dumps(row) for row in rows))
    return f"data.prompts={file}"


def ling(prompts: str, *arguments: str) -> RunSettings:
    return compose(["recipe=ling3_dspark", "target=ling3_tiny", prompts, *arguments])


@pytest.mark.parametrize(("draft", "block_size"), [("ling3", 16), ("ling3_block8", 8)])
def test_the_draft_of_a_small_ling_can_be_served(prompts: str, draft: str, block_size: int) -> None:
    settings = ling(prompts, f"draft={draft}")
    target = target_of(settings)
    config = draft_config(settings, target, MASK_TOKEN)
    assert (config.block_size, config.architecture) == (block_size, "LingDSparkModel")
    # The last layer too: this target gives a layer's output after the layer.
    assert config.target_layer_ids == (1, 2, 3, 4, 5)
    assert contract_problems(config.to_hf(), target.config, settings.data.max_tokens) == []
    assert len(settings.layout.target) == len(settings.layout.train) == 4
    assert config.num_attention_heads % 4 == config.num_key_value_heads % 4 == 0


def test_layer_ids_follow_from_the_checkpoints_own_config(prompts: str) -> None:
    settings = ling(prompts, "target.random_config.num_hidden_layers=12")
    assert draft_config(settings, target_of(settings), MASK_TOKEN).target_layer_ids == (
        1, 4, 6, 9, 11,
    )  # fmt: skip


def test_the_ling_recipe_stops_on_a_cpu_with_the_reason(prompts: str) -> None:
    with pytest.raises(UserError, match="KDA layers") as caught:
        make_plan(ling(prompts, *ON_CPU))
    assert caught.value.field == "layout.device"
    # A target without them is planned by the same recipe.
    plan = make_plan(ling(prompts, *ON_CPU, "target=qwen3_tiny", "layout.ring_bytes=1000000000"))
    assert plan.draft.block_size == 16 and plan.draft.hidden_size == 64


def test_a_start_from_the_targets_layers_is_refused(prompts: str) -> None:
    with pytest.raises(UserError, match=r"draft\.warm_start"):
        make_plan(ling(prompts, *ON_CPU, "draft.warm_start=true"))


@pytest.mark.parametrize(
    ("recipe", "hidden_size", "num_layers", "layer_ids"),
    [
        ("qwen3_8b_dspark", 4096, 36, (1, 9, 18, 26, 34)),
        ("qwen3_4b_dspark", 2560, 36, (1, 9, 18, 26, 34)),
        ("ling3_dspark", 2560, 42, (1, 11, 21, 31, 41)),
    ],
)
def test_the_ring_holds_two_batches_of_the_longest_samples(
    prompts: str, recipe: str, hidden_size: int, num_layers: int, layer_ids: tuple[int, ...]
) -> None:
    settings = compose([f"recipe={recipe}", prompts])
    last = "BailingMoeV3ForCausalLM" if recipe == "ling3_dspark" else "Qwen3ForCausalLM"
    config = {
        "num_hidden_layers": num_layers,
        "hidden_size": hidden_size,
        "intermediate_size": 6144,
        "num_attention_heads": 32,
        "head_dim": 128,
        "vocab_size": 150000,
        "max_position_embeddings": 32768,
    }
    target = TargetInfo("", config, last, num_layers, hidden_size, 150000, (2,), 0, True, "")
    draft = draft_config(settings, target, MASK_TOKEN)
    assert draft.target_layer_ids == layer_ids
    layout = RingLayout(draft.num_context_features, hidden_size, settings.target.dtype)
    batch = settings.train.global_batch_size * layout.slot_bytes(settings.data.max_tokens)
    # The ring takes what is left of a GPU: two batches are a small part of one of 80 GB.
    assert settings.layout.ring_bytes == 0 and 2 * batch <= 16 * 2**30
    assert not settings.draft.warm_start
    assert len({s.temperature for s in settings.data.sampling}) == 3


def test_the_random_qwen3_has_the_draft_of_qwen3_8b(prompts: str) -> None:
    settings = compose(["recipe=qwen3_8b_dspark", "target=qwen3_8b_random", prompts])
    config = settings.target.random_config
    target = TargetInfo("", config, "Qwen3ForCausalLM", 36, 4096, 151936, (2,), 0, True, "bfloat16")
    draft = draft_config(settings, target, MASK_TOKEN)
    assert (draft.num_key_value_heads, draft.head_dim, draft.intermediate_size) == (8, 128, 12288)
    assert (draft.block_size, draft.architecture) == (7, "Qwen3DSparkModel")
    assert contract_problems(draft.to_hf(), {**config, "architectures": ["Qwen3ForCausalLM"]}) == []
