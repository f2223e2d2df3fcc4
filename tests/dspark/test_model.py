"""The draft's arithmetic against loops, and what a block may and may not depend on."""

from __future__ import annotations

import pytest
import torch
from draft_testing import block_by_hand, random_draft, tiny_config
from tolerances import assert_close

from dspark.attention import attention_mask
from dspark.model import DSparkDraft
from dspark.reference import attention_mask_reference

S = 12


def inputs_of(config, *, anchors=((2, 7, 9),), seed=1, dtype=torch.float32):
    g = torch.Generator().manual_seed(seed)
    anchors_BA = torch.tensor(anchors)
    batch, count = anchors_BA.shape
    states = torch.randn(batch, S, config.num_context_features, generator=g)
    embeds = torch.randn(batch, count, config.block_size, config.hidden_size, generator=g)
    return states.to(dtype), embeds.to(dtype), anchors_BA


def run(draft, states, embeds, anchors):
    positions = torch.arange(S).expand(states.shape[0], S)
    context = draft.context_kv(states, positions)
    mask = torch.arange(S).view(1, 1, S) < anchors.unsqueeze(2)
    return draft.forward_blocks(embeds, anchors, context, mask)


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (4, 4), (3, 1)])
def test_blocks_equal_the_loops(heads, kv_heads):
    config = tiny_config(num_attention_heads=heads, num_key_value_heads=kv_heads)
    draft = random_draft(config)
    states, embeds, anchors = inputs_of(config, anchors=((0, 2, 7), (11, 5, 1)))
    hidden = run(draft, states, embeds, anchors)
    assert hidden.shape == (2, 3, config.block_size, config.hidden_size)
    for b in range(2):
        for a in range(3):
            expected = block_by_hand(draft, states[b], embeds[b, a], int(anchors[b, a]))
            assert_close(hidden[b, a].detach(), expected)


def test_bfloat16_stays_near_the_loops():
    config = tiny_config()
    draft = random_draft(config).to(torch.bfloat16)
    states, embeds, anchors = inputs_of(config, dtype=torch.bfloat16)
    hidden = run(draft, states, embeds, anchors)
    assert hidden.dtype == torch.bfloat16
    expected = block_by_hand(draft, states[0], embeds[0, 1], int(anchors[0, 1]))
    error = (hidden[0, 1].double() - expected).norm() / expected.norm()
    assert float(error) < 2e-2


def test_a_block_does_not_see_another():
    config = tiny_config()
    draft = random_draft(config)
    states, embeds, anchors = inputs_of(config)
    before = run(draft, states, embeds, anchors)
    embeds[0, 0] += 3.0
    after = run(draft, states, embeds, anchors)
    assert not torch.equal(before[0, 0], after[0, 0])
    torch.testing.assert_close(after[0, 1:], before[0, 1:], rtol=0, atol=0)


def test_a_block_sees_the_context_below_its_anchor_only():
    config = tiny_config()
    draft = random_draft(config)
    states, embeds, anchors = inputs_of(config, anchors=((2, 7, 9),))
    before = run(draft, states, embeds, anchors)
    changed = states.clone()
    changed[0, 7:] += 3.0
    after = run(draft, changed, embeds, anchors)
    torch.testing.assert_close(after[0, :2], before[0, :2], rtol=0, atol=0)
    assert not torch.equal(before[0, 2], after[0, 2])
    changed = states.clone()
    changed[0, 6] += 3.0
    after = run(draft, changed, embeds, anchors)
    assert not torch.equal(before[0, 1], after[0, 1])


def test_rows_of_a_block_see_each_other_in_both_directions():
    config = tiny_config()
    draft = random_draft(config)
    states, embeds, anchors = inputs_of(config)
    before = run(draft, states, embeds, anchors)
    for moved in range(config.block_size):
        changed = embeds.clone()
        changed[0, 1, moved] += 1.0
        after = run(draft, states, changed, anchors)
        for row in range(config.block_size):
            assert not torch.equal(before[0, 1, row], after[0, 1, row]), (moved, row)


def test_absolute_positions_matter():
    config = tiny_config()
    draft = random_draft(config)
    states, embeds, anchors = inputs_of(config)
    mask = torch.arange(S).view(1, 1, S) < anchors.unsqueeze(2)
    context = draft.context_kv(states, torch.arange(S).unsqueeze(0))
    at_home = draft.forward_blocks(embeds, anchors, context, mask)
    moved = draft.forward_blocks(embeds, anchors + 1, context, mask)
    assert not torch.allclose(at_home, moved, atol=1e-4)
    # Moving context and blocks together changes nothing: the embedding is relative.
    context = draft.context_kv(states, torch.arange(S).unsqueeze(0) + 40)
    together = draft.forward_blocks(embeds, anchors + 40, context, mask)
    torch.testing.assert_close(together, at_home, rtol=1e-3, atol=1e-4)


def test_a_block_without_context_is_finite_and_has_finite_gradients():
    config = tiny_config()
    draft = random_draft(config)
    states, embeds, _ = inputs_of(config)
    hidden = run(draft, states, embeds, torch.zeros(1, 3, dtype=torch.int64))
    hidden.sum().backward()
    assert torch.isfinite(hidden).all()
    assert all(torch.isfinite(p.grad).all() for p in draft.layers.parameters())


@pytest.mark.parametrize("block", [1, 3])
def test_mask_equals_the_loops(block):
    g = torch.Generator().manual_seed(0)
    context = torch.rand(2, 4, 5, generator=g) < 0.5
    assert torch.equal(attention_mask(context, block), attention_mask_reference(context, block))


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
def test_decoding_step_by_step_gives_the_training_features(kind):
    config = tiny_config(markov_head_type=kind, block_size=5)
    draft = random_draft(config)
    g = torch.Generator().manual_seed(2)
    hidden = torch.randn(2, 3, 5, config.hidden_size, generator=g)
    prev = torch.randint(0, config.vocab_size, (2, 3, 5), generator=g)
    whole = draft.markov_features(hidden, prev).view(6, 5, -1)
    state = None
    for k in range(5):
        rows, tokens = hidden.view(6, 5, -1)[:, k], prev.view(6, 5)[:, k]
        part, state = draft.markov_step(rows, tokens, state)
        torch.testing.assert_close(part, whole[:, k], rtol=1e-5, atol=1e-6)
    assert (state is not None) == (kind == "rnn")


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
def test_markov_features_by_hand(kind):
    config = tiny_config(markov_head_type=kind)
    draft = random_draft(config)
    head, rank = draft.markov_head, config.markov_rank
    hidden = torch.randn(1, 1, 3, config.hidden_size)
    prev = torch.tensor([[[4, 60, 7]]])
    found = draft.markov_features(hidden, prev)[0, 0]
    state = torch.zeros(rank)
    for k in range(3):
        token, h = head.markov_w1.weight[prev[0, 0, k]], hidden[0, 0, k]
        expected = token
        if kind == "gated":
            raw = head.gate_proj.weight @ torch.cat([h, token]) + head.gate_proj.bias
            expected = token * torch.sigmoid(raw)
        elif kind == "rnn":
            raw = head.joint_proj.weight @ torch.cat([state, token, h]) + head.joint_proj.bias
            keep = torch.sigmoid(raw[:rank])
            state = keep * state + (1 - keep) * torch.tanh(raw[rank : 2 * rank])
            expected = torch.tanh(raw[2 * rank :])
        torch.testing.assert_close(found[k], expected, rtol=1e-5, atol=1e-6)


def test_plain_dflash_has_no_markov_head():
    config = tiny_config(markov_rank=0)
    draft = DSparkDraft(config)
    hidden = torch.zeros(1, 1, 3, config.hidden_size)
    prev = torch.zeros(1, 1, 3, dtype=torch.int64)
    assert draft.markov_features(hidden, prev) is None
    assert draft.markov_step(hidden[0, 0], prev[0, 0], None) == (None, None)
    assert draft.confidence_logits(hidden, prev).shape == (1, 1, 3)


@pytest.mark.parametrize("with_markov", [True, False])
def test_confidence_is_float32_and_reads_the_previous_token_where_asked(with_markov):
    config = tiny_config(confidence_head_with_markov=with_markov)
    draft = random_draft(config).to(torch.bfloat16)
    hidden = torch.randn(1, 1, 3, config.hidden_size).to(torch.bfloat16)
    prev = torch.tensor([[[1, 2, 3]]])
    logits = draft.confidence_logits(hidden, prev)
    assert logits.dtype == torch.float32 and logits.shape == prev.shape
    assert torch.equal(logits, draft.confidence_logits(hidden, prev + 1)) != with_markov


@pytest.mark.parametrize("detach", [True, False])
def test_detached_confidence_moves_its_own_weights_alone(detach):
    draft = random_draft(tiny_config())
    hidden = torch.randn(1, 1, 3, draft.config.hidden_size, requires_grad=True)
    prev = torch.tensor([[[1, 2, 3]]])
    draft.confidence_logits(hidden, prev, detach_input=detach).sum().backward()
    assert draft.confidence_head.proj.weight.grad is not None
    assert (hidden.grad is None) == detach
    assert (draft.markov_head.markov_w1.weight.grad is None) == detach


def test_a_fresh_draft_has_silent_heads():
    draft = DSparkDraft(tiny_config())
    assert not draft.markov_head.markov_w2.weight.any()
    assert not draft.confidence_head.proj.weight.any()
    assert draft.markov_head.markov_w1.weight.any()
    assert torch.equal(draft.norm.weight, torch.ones(draft.config.hidden_size))
    assert float(draft.layers[0].self_attn.q_proj.weight.std()) == pytest.approx(0.02, rel=0.2)


def test_parameter_names_are_the_serving_contract():
    draft = DSparkDraft(tiny_config(num_hidden_layers=1, markov_head_type="gated"))
    assert set(draft.state_dict()) == {
        "fc.weight", "hidden_norm.weight", "norm.weight",
        "layers.0.input_layernorm.weight", "layers.0.post_attention_layernorm.weight",
        *(f"layers.0.self_attn.{n}.weight" for n in
          ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")),
        *(f"layers.0.mlp.{n}.weight" for n in ("gate_proj", "up_proj", "down_proj")),
        "markov_head.markov_w1.weight", "markov_head.markov_w2.weight",
        "markov_head.gate_proj.weight", "markov_head.gate_proj.bias",
        "confidence_head.proj.weight", "confidence_head.proj.bias",
    }  # fmt: skip
