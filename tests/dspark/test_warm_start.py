"""The frozen tensors of a target folder, and drafts that begin as their target's last layers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from dspark.config import DraftConfig
from dspark.model import DSparkDraft
from dspark.target import FrozenTarget
from dspark.warm_start import LAYER_WEIGHTS, init_from_target, leading_directions

V, H = 53, 32


def make_target(folder: Path, *, tied: bool = False, shards: bool = False) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=V, hidden_size=H, intermediate_size=48, num_hidden_layers=5,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
        initializer_range=0.2, tie_word_embeddings=tied,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data += torch.randn_like(parameter) * 0.1
    model.save_pretrained(folder, **({"max_shard_size": "20KB"} if shards else {}))
    return model


def draft_for(target: FrozenTarget, **settings) -> DSparkDraft:
    base = {"num_layers": 2, "block_size": 3, "mask_token_id": 1, "markov_rank": 8}
    base["num_context_layers"] = 3
    return DSparkDraft(DraftConfig.for_target(target.config, **{**base, **settings}))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("shards", [True, False])
def test_frozen_tensors_give_the_targets_own_logits(tmp_path, tied, shards):
    model = make_target(tmp_path, tied=tied, shards=shards)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == shards
    target = FrozenTarget.load(tmp_path, torch.float32)
    ids = torch.tensor([[3, 9, 1]])
    with torch.no_grad():
        states = model.model(ids).last_hidden_state
        torch.testing.assert_close(states @ target.lm_head.T, model(ids).logits)
    assert torch.equal(target.embedding, model.get_input_embeddings().weight)
    assert torch.equal(target.final_norm, model.model.norm.weight)
    assert (target.lm_head is target.embedding) == tied
    assert target.vocab_size == V
    assert not target.embedding.requires_grad


def test_frozen_tensors_are_found_under_lings_names(tmp_path):
    names = ("model.word_embeddings.weight", "model.norm.weight", "lm_head.weight")
    tensors = {name: torch.randn(V, H) for name in names}
    tensors["model.norm.weight"] = torch.randn(H)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"model_type": "bailing_hybrid"}')
    target = FrozenTarget.load(tmp_path, torch.float32)
    found = (target.embedding, target.final_norm, target.lm_head)
    assert all(torch.equal(tensors[name], f) for name, f in zip(names, found, strict=True))


def test_frozen_tensors_take_the_asked_type(tmp_path):
    make_target(tmp_path)
    target = FrozenTarget.load(tmp_path, torch.bfloat16)
    assert target.embedding.dtype == target.lm_head.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("name", "message"),
    [("model.embed_tokens.weight", "no token embedding"), ("lm_head.weight", "no lm_head")],
)
def test_a_folder_without_them_is_refused(tmp_path, name, message):
    make_target(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    del tensors[name]
    save_file(tensors, path)
    with pytest.raises(ValueError, match=rf"target\.path=.*{message}.*allowed: one of"):
        FrozenTarget.load(tmp_path, torch.float32)


def test_warm_start_takes_the_last_layers(tmp_path):
    theirs = dict(make_target(tmp_path).named_parameters())
    draft = draft_for(FrozenTarget.load(tmp_path, torch.float32))
    done = init_from_target(draft, tmp_path)
    ours = dict(draft.named_parameters())
    for layer in range(2):
        for name in LAYER_WEIGHTS:
            wanted = theirs[f"model.layers.{3 + layer}.{name}"]
            assert torch.equal(ours[f"layers.{layer}.{name}"], wanted), name
    assert torch.equal(ours["norm.weight"], theirs["model.norm.weight"])
    last_input_norm = theirs["model.layers.4.input_layernorm.weight"]
    assert torch.equal(ours["hidden_norm.weight"], last_input_norm)
    assert set(done) == {
        "norm.weight", "hidden_norm.weight", "fc.weight", "markov_head.markov_w1.weight",
        *(f"layers.{i}.{name}" for i in range(2) for name in LAYER_WEIGHTS),
    }  # fmt: skip
    assert not ours["markov_head.markov_w2.weight"].any()
    states = torch.randn(2, 3 * H)
    mean = states.view(2, 3, H).mean(1)
    torch.testing.assert_close(draft.fc(states), mean, rtol=1e-5, atol=1e-6)


def test_warm_start_leaves_what_does_not_fit(tmp_path):
    make_target(tmp_path)
    draft = draft_for(
        FrozenTarget.load(tmp_path, torch.float32), intermediate_size=20, markov_rank=0,
        confidence_head_with_markov=False,
    )  # fmt: skip
    before = draft.layers[0].mlp.up_proj.weight.clone()
    done = init_from_target(draft, tmp_path)
    assert torch.equal(draft.layers[0].mlp.up_proj.weight, before)
    assert "layers.0.self_attn.q_proj.weight" in done
    assert not any("mlp" in name or "markov" in name for name in done)


def test_leading_directions_are_those_of_the_largest_variance():
    g = torch.Generator().manual_seed(0)
    scales = torch.tensor([5.0, 0.1, 3.0, 0.2])
    table = torch.randn(4000, 4, generator=g) * scales + 7.0
    found = leading_directions(table, 2)
    torch.testing.assert_close(found.mean(0), torch.zeros(2), rtol=0, atol=1e-3)
    torch.testing.assert_close(found.std(0), torch.ones(2), rtol=1e-2, atol=0)
    for column, axis in enumerate((0, 2)):
        pair = torch.stack([found[:, column], table[:, axis]])
        assert abs(float(torch.corrcoef(pair)[0, 1])) > 0.99


def test_a_rank_above_the_width_leaves_columns_at_zero():
    found = leading_directions(torch.randn(30, 3), 5)
    assert found.shape == (30, 5)
    assert found[:, :3].any(0).all() and not found[:, 3:].any()


def test_a_target_without_such_attention_is_refused(tmp_path):
    make_target(tmp_path)
    draft = draft_for(FrozenTarget.load(tmp_path, torch.float32))
    before = {name: value.clone() for name, value in draft.named_parameters()}
    path = tmp_path / "model.safetensors"
    save_file({n.replace("self_attn", "attention"): t for n, t in load_file(path).items()}, path)
    with pytest.raises(ValueError, match=r"layers 3 to 4 .* set draft\.warm_start=false"):
        init_from_target(draft, tmp_path)
    assert all(torch.equal(value, before[name]) for name, value in draft.named_parameters())
