"""The draft's geometry: inheriting from targets, writing and reading config.json, refusals."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from draft_testing import tiny_config
from transformers import LlamaConfig, Qwen3Config
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from dspark.config import DraftConfig, rope_parameters_of, spread_layers
from dspark.rope import RotaryTable, apply_rotary, inverse_frequencies

SMOLLM2 = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000,
    "max_position_embeddings": 8192,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LINEAR = {"rope_type": "linear", "factor": 2.0}


def for_target(target=SMOLLM2, **settings) -> DraftConfig:
    base = {"num_layers": 2, "block_size": 5, "mask_token_id": 17, "markov_rank": 128}
    return DraftConfig.for_target(target, **{**base, **settings})


def test_geometry_comes_from_the_target():
    config = for_target()
    assert config.target_layer_ids == (1, 8, 15, 21, 28)
    assert (config.hidden_size, config.head_dim, config.num_key_value_heads) == (576, 64, 3)
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 100000}
    assert config.num_context_features == 5 * 576
    assert config.confidence_features == 576 + 128
    assert for_target(markov_rank=8, confidence_head_with_markov=False).confidence_features == 576


LING = {
    "architectures": ["BailingMoeV3ForCausalLM"],
    "model_type": "bailing_hybrid",
    "hidden_size": 160,
    "intermediate_size": 320,
    "moe_intermediate_size": 48,
    "num_hidden_layers": 42,
    "num_attention_heads": 6,
    "head_dim": 128,
    "vocab_size": 1024,
    "rms_norm_eps": 1e-6,
    "rope_theta": 6000000,
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 6000000, "partial_rotary_factor": 0.5,
    },
    "partial_rotary_factor": 0.5,
    "kv_lora_rank": 512,
    "max_position_embeddings": 131072,
}  # fmt: skip


def test_a_draft_for_ling_is_a_plain_one_of_its_width():
    config = for_target(
        LING, num_layers=5, block_size=16, architecture="LingDSparkModel", capture_last_layer=True
    )
    # Heads of 128 whatever the width; the dense layers' MLP, not an expert's.
    assert (config.hidden_size, config.num_attention_heads, config.head_dim) == (160, 6, 128)
    assert (config.num_key_value_heads, config.intermediate_size) == (6, 320)
    assert config.target_layer_ids == (1, 11, 21, 31, 41)
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 6000000}
    assert inverse_frequencies(config)[0].numel() == 64
    assert "partial_rotary_factor" not in config.to_hf()
    assert DraftConfig.from_hf(config.to_hf()) == config
    # Elsewhere a rotated share of the head is inherited.
    plain = {key: value for key, value in LING.items() if key != "kv_lora_rank"}
    assert for_target(plain).rope_parameters["partial_rotary_factor"] == 0.5


def test_a_target_without_positions_lends_its_base_if_it_names_one():
    target = {**LING, "use_mla_nope": True, "rope_parameters": None}
    assert for_target(target).rope_parameters["rope_theta"] == 6000000
    assert for_target({**target, "rope_theta": 7e5}).rope_parameters["rope_theta"] == 7e5


def test_settings_of_the_draft_win_over_the_target():
    config = for_target(
        {**SMOLLM2, "head_dim": 32}, intermediate_size=100, target_layer_ids=(4, 2, 4),
        markov_head_type="rnn", architecture="LingDSparkModel",
    )  # fmt: skip
    assert config.target_layer_ids == (2, 4)
    assert (config.intermediate_size, config.head_dim) == (100, 32)
    assert (config.markov_head_type, config.architecture) == ("rnn", "LingDSparkModel")


@pytest.mark.parametrize(
    ("count", "last", "ids"),
    [(5, 28, (1, 8, 15, 21, 28)), (1, 9, (9,)), (3, 3, (1, 2, 3)), (1, 0, (0,)), (2, 2, (1, 2))],
)
def test_spread(count, last, ids):
    assert spread_layers(count, last) == ids


@pytest.mark.parametrize("depth", range(3, 40))
def test_every_spread_is_ascending_and_capturable(depth):
    for count in range(1, depth - 1):
        ids = spread_layers(count, depth - 2)
        assert len(set(ids)) == count and list(ids) == sorted(ids)
        assert ids[0] >= 1 and ids[-1] == depth - 2


def test_the_last_layer_needs_an_engine_that_captures_it():
    with pytest.raises(ValueError, match=r"target_layer_ids=\[3, 29\].*cannot be captured"):
        for_target(target_layer_ids=(3, 29))
    assert for_target(target_layer_ids=(3, 29), capture_last_layer=True).target_layer_ids[-1] == 29
    with pytest.raises(ValueError, match="0 to 29"):
        for_target(target_layer_ids=(30,), capture_last_layer=True)


def test_a_shallow_target_is_refused_with_the_number_that_would_do():
    with pytest.raises(ValueError, match=r"num_context_layers=5.*1 to 2"):
        for_target({**SMOLLM2, "num_hidden_layers": 4})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("hidden_size", 0),
        ("block_size", 0),
        ("num_key_value_heads", 3),
        ("head_dim", 7),
        ("rms_norm_eps", 0.0),
        ("rope_parameters", {"rope_theta": 1.0}),
        ("target_layer_ids", ()),
        ("target_layer_ids", (4, 1)),
        ("target_layer_ids", (1, 1)),
        ("target_layer_ids", (-1, 1)),
        ("target_layer_ids", (1, 6)),
        ("mask_token_id", 67),
        ("mask_token_id", -1),
        ("markov_rank", -1),
        ("markov_head_type", "lstm"),
        ("architecture", "LlamaForCausalLM"),
    ],
)
def test_refusals_name_the_field(field, value):
    with pytest.raises(ValueError, match=rf"draft\.{field}=.*allowed: "):
        dataclasses.replace(tiny_config(), **{field: value})


def test_confidence_cannot_read_a_markov_head_that_is_not_there():
    with pytest.raises(ValueError, match="confidence_head_with_markov"):
        dataclasses.replace(tiny_config(), markov_rank=0)


@pytest.mark.parametrize("scaling", [None, LLAMA3, YARN, LINEAR])
def test_config_json_round_trip(scaling):
    target = {**SMOLLM2, "rope_scaling": scaling}
    config = for_target(target, markov_head_type="gated", confidence_head_with_markov=False)
    written = json.loads(json.dumps(config.to_hf()))
    assert DraftConfig.from_hf(written) == config


def test_config_json_states_the_serving_contract_at_top_level():
    written = tiny_config().to_hf()
    assert written["architectures"] == ["Qwen3DSparkModel"]
    assert written["model_type"] == "qwen3"
    assert written["dtype"] == written["torch_dtype"] == "bfloat16"
    assert written["block_size"] == 3
    assert written["target_layer_ids"] == [1, 4]
    assert written["num_target_layers"] == 6
    assert (written["mask_token_id"], written["markov_rank"]) == (5, 6)
    assert written["markov_head_type"] == "vanilla"
    assert written["enable_confidence_head"] is True
    assert written["confidence_head_with_markov"] is True
    assert written["sample_from_anchor"] is True
    assert written["is_causal"] is False
    assert written["layer_types"] == ["full_attention"] * 2
    assert written["tie_word_embeddings"] is False
    assert written["rope_theta"] == written["rope_parameters"]["rope_theta"] == 1000.0
    assert written["rope_scaling"] is None
    for nested in ("dspark_config", "dflash_config", "dspark_block_size"):
        assert nested not in written


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("hidden_act", "gelu"),
        ("is_causal", True),
        ("sample_from_anchor", False),
        ("rope_is_neox_style", False),
        ("use_gemma_norm", True),
        ("layer_types", ["full_attention", "sliding_attention"]),
    ],
)
def test_a_config_of_another_arithmetic_is_refused(field, value):
    written = {**tiny_config().to_hf(), field: value}
    with pytest.raises(ValueError, match=rf"draft\.{field}="):
        DraftConfig.from_hf(written)


@pytest.mark.parametrize("field", ["head_dim", "block_size", "target_layer_ids", "architectures"])
def test_a_config_with_a_field_missing_is_refused(field):
    written = tiny_config().to_hf()
    del written[field]
    with pytest.raises(ValueError, match="not complete"):
        DraftConfig.from_hf(written)


def test_drafts_without_a_markov_head_are_not_servable():
    assert tiny_config().servable
    assert not tiny_config(markov_rank=0).servable


@pytest.mark.parametrize("scaling", [None, LLAMA3, YARN, LINEAR])
@pytest.mark.parametrize("spelling", ["rope_scaling", "rope_parameters"])
def test_rotary_embedding_equals_the_targets(scaling, spelling):
    """Through the config.json that is exported, in either spelling of the target's."""
    settings = {"rope_type": "default"} if scaling is None else dict(scaling)
    target = {**SMOLLM2, "max_position_embeddings": 256}
    del target["rope_theta"]
    reference = LlamaConfig(**target, rope_parameters={**settings, "rope_theta": 5000.0})
    if spelling == "rope_parameters":
        target["rope_parameters"] = {**settings, "rope_theta": 5000.0}
    else:
        target.update(rope_theta=5000.0, rope_scaling=scaling)
    written = for_target(target).to_hf()
    config = DraftConfig.from_hf(json.loads(json.dumps(written)))
    theirs = LlamaRotaryEmbedding(reference)
    frequencies, factor = inverse_frequencies(config)
    torch.testing.assert_close(frequencies, theirs.inv_freq, rtol=0, atol=0)
    assert factor == theirs.attention_scaling
    positions = torch.tensor([[0, 1, 63, 64, 200]])
    cos, sin = RotaryTable(config)(positions)
    expected = theirs(torch.zeros(1), positions)
    torch.testing.assert_close((cos[:, 0], sin[:, 0]), expected, rtol=1e-6, atol=1e-6)
    # What transformers, and with it the serving engine, makes of the export.
    loaded = Qwen3Config(**written)
    assert loaded.rope_parameters["rope_theta"] == 5000.0
    assert loaded.rope_parameters["rope_type"] == settings["rope_type"]


def test_old_spelling_of_the_rope_type():
    rope = rope_parameters_of({"rope_theta": 3.0, "rope_scaling": {"type": "linear", "factor": 2}})
    assert rope == {"rope_type": "linear", "rope_theta": 3.0, "factor": 2}


def test_rope_of_several_axes_becomes_plain():
    rope = rope_parameters_of(
        {"rope_theta": 3.0, "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}}
    )
    assert rope == {"rope_type": "default", "rope_theta": 3.0}


def test_rope_that_differs_between_layers_is_refused():
    nested = {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}
    with pytest.raises(ValueError, match=r"rope_parameters.*one setting for all layers"):
        for_target({**SMOLLM2, "rope_parameters": nested})


def test_an_unknown_rope_type_is_refused():
    config = tiny_config(rope_parameters={"rope_type": "spiral", "rope_theta": 1.0})
    with pytest.raises(ValueError, match="rope_type='spiral' is not known"):
        inverse_frequencies(config)


def test_partial_rotary_embedding_is_inherited_and_passes_the_rest():
    config = for_target({**SMOLLM2, "partial_rotary_factor": 0.5})
    assert config.to_hf()["partial_rotary_factor"] == 0.5
    assert config.to_hf()["rope_parameters"]["partial_rotary_factor"] == 0.5
    cos, sin = RotaryTable(config)(torch.tensor([[3]]))
    assert cos.shape[-1] == 32
    x = torch.randn(1, 1, 1, 64)
    turned = apply_rotary(x, cos, sin)
    assert torch.equal(turned[..., 32:], x[..., 32:])
    assert not torch.equal(turned[..., :32], x[..., :32])
