"""From samples to loss: alignment of labels and states, padding, frozen tensors, empty batches."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from draft_testing import random_draft, tiny_config
from tolerances import assert_close

from dspark.batch import (
    TrainingBatch,
    TrainingSample,
    batch_denominators,
    lay_out,
    previous_tokens,
)
from dspark.objective import ObjectiveConfig
from dspark.reference import objective_reference
from dspark.training import DraftWithLoss, block_embeddings

CONFIG = tiny_config()
H, F, V, G = CONFIG.hidden_size, CONFIG.num_context_features, CONFIG.vocab_size, CONFIG.block_size


@dataclass(frozen=True)
class Taught(TrainingSample):
    """A sample beside its states."""

    features_SF: torch.Tensor
    target_states_SD: torch.Tensor


def sample_of(length: int, *, seed=0, name="a", mask=None, epoch=0) -> Taught:
    g = torch.Generator().manual_seed(seed)
    return Taught(
        sample_id=name,
        epoch=epoch,
        token_ids_S=torch.randint(0, V, (length,), generator=g),
        loss_mask_S=torch.arange(length) >= 3 if mask is None else mask,
        features_SF=torch.randn(length, F, generator=g),
        target_states_SD=torch.randn(length, H, generator=g),
    )


def batch_of(samples, *, num_anchors=4, dtype=torch.float32, **layout) -> TrainingBatch:
    made = lay_out(samples, num_anchors=num_anchors, block_size=G, seed=0, **layout)
    return made.with_states(states_of(samples), made.empty_states(F, H, dtype))


def states_of(samples):
    return [(s.features_SF, s.target_states_SD) for s in samples]


def model_of(objective=None, *, seed=0, tied=False, config=CONFIG) -> DraftWithLoss:
    g = torch.Generator().manual_seed(seed)
    embedding = torch.randn(V, H, generator=g)
    head = embedding if tied else torch.randn(V, H, generator=g) * 0.4
    return DraftWithLoss(random_draft(config), embedding, head, objective or ObjectiveConfig())


def test_loss_and_gradients_equal_the_reference_of_each_block_alone():
    """Row g of the block at p: label p+1+g, target state p+g, previous token p+g, context < p."""
    objective = ObjectiveConfig(nla=0.2, kl=0.1, position_weights="credit")
    model = model_of(objective)
    samples = [sample_of(11, seed=1, name="x"), sample_of(8, seed=2, name="y")]
    batch = batch_of(samples, pad_multiple=4)
    result = model(batch, 0.5, 0.25)
    result.loss.backward()
    got = {n: p.grad.clone() for n, p in model.draft.named_parameters()}
    model.zero_grad()
    draft, total = model.draft, torch.zeros((), dtype=torch.float64)
    for b, sample in enumerate(samples):
        tokens, length = sample.token_ids_S, sample.token_ids_S.shape[0]
        for a, p in enumerate(batch.anchors_BA[b].tolist()):
            if not batch.valid_BAG[b, a].any():
                continue
            context = draft.context_kv(sample.features_SF[None, :p], torch.arange(p)[None])
            ids = torch.tensor([int(tokens[p])] + [CONFIG.mask_token_id] * (G - 1))
            hidden = draft.forward_blocks(
                model.embedding[ids][None, None], torch.tensor([[p]]), context,
                torch.ones(1, 1, p, dtype=torch.bool),
            )  # fmt: skip
            inside = [p + g for g in range(G) if p + 1 + g < length]
            missing = [0] * (G - len(inside))
            prev = torch.tensor([[[*tokens[inside].tolist(), *missing]]])
            total = total + objective_reference(
                hidden[0, 0],
                draft.markov_features(hidden, prev)[0, 0],
                model.lm_head,
                draft.markov_head.markov_w2.weight,
                sample.target_states_SD,
                torch.tensor(inside + missing),
                torch.tensor([int(tokens[at + 1]) for at in inside] + missing),
                torch.tensor([True] * len(inside) + [False] * len(missing)),
                draft.confidence_logits(hidden, prev)[0, 0],
                block_size=G, config=objective, term_scale=0.5, confidence_scale=0.25,
            )  # fmt: skip
    assert_close(result.loss.detach(), total.detach())
    total.backward()
    for name, parameter in model.draft.named_parameters():
        error = (got[name] - parameter.grad).norm() / parameter.grad.norm()
        assert float(error) < 1e-4, name


def test_a_target_that_counts_is_learned():
    """Next token = token + 1. Labels or states one place off could not reach acceptance 1."""
    vocab, width, block = 23, 24, 3
    config = tiny_config(
        vocab_size=vocab, num_hidden_layers=1, markov_rank=4, mask_token_id=vocab - 1,
        target_layer_ids=(0,), num_target_layers=2,
    )  # fmt: skip
    torch.manual_seed(0)
    embedding = torch.nn.functional.normalize(torch.randn(vocab, width), dim=1) * 5
    states = embedding.roll(-1, 0)  # the state at token t points at t + 1
    model = DraftWithLoss(
        random_draft(config), embedding, embedding, ObjectiveConfig(ce=0.5, l1=0.5)
    )
    optimizer = torch.optim.Adam(model.draft.parameters(), lr=5e-3)
    result = None
    for step in range(120):
        samples = []
        for k in range(4):
            tokens = (torch.arange(14) + 5 * step + 7 * k) % (vocab - 1)
            samples.append(
                Taught(
                    f"{step}-{k}", 0, tokens, torch.ones(14, dtype=torch.bool),
                    embedding[tokens], states[tokens],
                )
            )  # fmt: skip
        layout = lay_out(samples, num_anchors=6, block_size=block, seed=0)
        into = layout.empty_states(width, width, torch.float32)
        batch = layout.with_states(states_of(samples), into)
        terms, confidence = batch_denominators(batch, model.config)
        result = model(batch, 1 / terms, 1 / confidence)
        optimizer.zero_grad()
        result.loss.backward()
        optimizer.step()
    counts = result.metrics["valid_count"]
    assert (result.metrics["hit_sum"] / counts > 0.9).all()
    assert (result.metrics["alpha_sum"] / counts > 0.8).all()


def test_previous_tokens_and_block_embeddings():
    batch = batch_of([sample_of(9)], num_anchors=2)
    prev = previous_tokens(batch)
    tokens = batch.token_ids_BS[0]
    for a, p in enumerate(batch.anchors_BA[0].tolist()):
        inside = min(G, 9 - p)
        assert prev[0, a, :inside].tolist() == tokens[p : p + inside].tolist()
    table = torch.arange(10.0).unsqueeze(1)
    embeds = block_embeddings(table, torch.tensor([[7, 2]]), 9, 3)
    assert embeds.squeeze(-1).tolist() == [[[7.0, 9.0, 9.0], [2.0, 9.0, 9.0]]]
    assert block_embeddings(table, torch.tensor([4]), 9, 1).shape == (1, 1, 1)


def test_padding_changes_nothing():
    model = model_of()
    samples = [sample_of(9, seed=1), sample_of(6, seed=2, name="b")]
    tight, loose = batch_of(samples), batch_of(samples, pad_multiple=16, num_anchors=4)
    assert loose.token_ids_BS.shape == (2, 16)
    a, b = model(tight, 1.0, 1.0), model(loose, 1.0, 1.0)
    assert_close(a.loss.detach(), b.loss.detach())
    assert torch.equal(tight.anchors_BA, loose.anchors_BA)


def test_anchors_of_a_sample_do_not_depend_on_its_company():
    alone = batch_of([sample_of(30, name="me", epoch=4)])
    others = batch_of([sample_of(40, seed=3, name="o"), sample_of(30, name="me", epoch=4)])
    assert torch.equal(alone.anchors_BA[0], others.anchors_BA[1])
    assert torch.equal(alone.labels_BAG[0], others.labels_BAG[1])
    next_epoch = batch_of([sample_of(30, name="me", epoch=5)])
    assert not torch.equal(alone.anchors_BA[0], next_epoch.anchors_BA[0])


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
@pytest.mark.parametrize("empty", ["no sample", "no anchor"])
def test_an_empty_batch_gives_zero_gradients_to_every_parameter(kind, empty):
    """A parameter without gradient on one rank would make the ranks' reductions differ."""
    model = model_of(config=tiny_config(markov_head_type=kind))
    alternating = torch.tensor([False, True, False, True, False])
    batch = batch_of([] if empty == "no sample" else [sample_of(5, mask=alternating)])
    result = model(batch, 1.0, 1.0)
    assert float(result.loss.detach()) == 0.0
    result.loss.backward()
    for name, parameter in model.draft.named_parameters():
        assert parameter.grad is not None, name
        assert torch.equal(parameter.grad, torch.zeros_like(parameter)), name
    assert [float(d) for d in batch_denominators(batch, model.config)] == [0.0, 0.0]


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
@pytest.mark.parametrize("rank", [0, 6])
def test_every_parameter_learns(kind, rank):
    model = model_of(config=tiny_config(markov_head_type=kind, markov_rank=rank))
    model(batch_of([sample_of(20)]), 1.0, 1.0).loss.backward()
    for name, parameter in model.draft.named_parameters():
        assert parameter.grad.abs().max() > 0, name


def test_detach_confidence_input_keeps_the_backbone_still():
    batch = batch_of([sample_of(20)])
    grads = []
    for confidence, detach in ((0.0, False), (1.0, True), (1.0, False)):
        model = model_of(ObjectiveConfig(confidence=confidence, detach_confidence_input=detach))
        model(batch, 1.0, 1.0).loss.backward()
        grads.append({n: p.grad for n, p in model.draft.named_parameters()})
    without, detached, attached = grads
    backbone = [n for n in without if not n.startswith("confidence_head")]
    assert all(torch.equal(without[n], detached[n]) for n in backbone)
    assert not torch.equal(without["fc.weight"], attached["fc.weight"])
    assert detached["confidence_head.proj.weight"].abs().max() > 0


@pytest.mark.parametrize("tied", [True, False])
def test_frozen_tensors_survive_casts_and_stay_out_of_the_checkpoint(tied):
    model = model_of(tied=tied)
    before = model.lm_head.clone()
    model.to(torch.bfloat16)
    assert model.draft.fc.weight.dtype == torch.bfloat16
    assert model.embedding.dtype == torch.float32
    assert torch.equal(model.lm_head, before)
    assert (model.lm_head is model.embedding) == tied
    moved = model_of(tied=tied).to("meta")
    assert moved.embedding.device.type == moved.lm_head.device.type == "meta"
    assert (moved.lm_head is moved.embedding) == tied
    assert not any("embedding" in n or "lm_head" in n for n in model.state_dict())
    assert all(n.startswith("draft.") for n, _ in model.named_parameters())


def test_a_step_runs_in_bfloat16():
    model = DraftWithLoss(
        random_draft(CONFIG).to(torch.bfloat16),
        torch.randn(V, H).to(torch.bfloat16),
        torch.randn(V, H).to(torch.bfloat16),
        ObjectiveConfig(),
    )
    result = model(batch_of([sample_of(20)], dtype=torch.bfloat16), 0.01, 0.01)
    result.loss.backward()
    assert result.loss.dtype == torch.float32 and torch.isfinite(result.loss)
    assert all(p.grad.dtype == torch.bfloat16 for p in model.draft.parameters())


@pytest.mark.parametrize("max_documents", [3, 5])
@pytest.mark.parametrize("row_tokens", [25, 40])
def test_documents_packed_into_a_row_neither_see_nor_move_each_other(row_tokens, max_documents):
    """One row of three documents gives the loss and the gradients of three rows."""
    model = model_of(ObjectiveConfig(nla=0.3, position_weights="dpace"))
    samples = [sample_of(n, seed=n, name=str(n)) for n in (11, 5, 9)]
    outcome = []
    for layout in (
        {"pad_multiple": 8},
        {"row_tokens": row_tokens, "max_documents": max_documents},
    ):
        batch = batch_of(samples, **layout)
        terms, confidence = batch_denominators(batch, model.config)
        model.zero_grad()
        result = model(batch, 1 / float(terms), 1 / float(confidence))
        result.loss.backward()
        outcome.append((result, {n: p.grad for n, p in model.draft.named_parameters()}))
    (apart, apart_grads), (packed, packed_grads) = outcome
    assert_close(packed.loss.detach(), apart.loss.detach())
    for name, grad in apart_grads.items():
        assert_close(packed_grads[name], grad)


def test_target_distributions_are_needed_once_at_each_position():
    samples = [sample_of(24, seed=1, name="x"), sample_of(7, seed=2, name="y")]
    batch = batch_of(samples, num_anchors=9, pad_multiple=8)
    slots = batch.target_slots_U[batch.target_of_row_N].view(batch.valid_BAG.shape)
    places = torch.arange(2).view(2, 1, 1) * 24 + batch.anchors_BA.unsqueeze(2) + torch.arange(G)
    assert torch.equal(slots[batch.valid_BAG], places[batch.valid_BAG])
    assert batch.target_slots_U.unique().numel() == batch.target_slots_U.numel()
    assert batch.target_slots_U.numel() < int(batch.valid_BAG.sum())
    of_block = batch.target_of_row_N.view(-1, G)
    assert (of_block >= batch.target_bounds_M2[:, :1]).all()
    assert (of_block < batch.target_bounds_M2[:, 1:]).all()


def test_every_row_has_the_same_shapes_whatever_it_holds():
    """What is compiled for one row serves all; the rows' padding is zeros."""
    full = [sample_of(n, seed=n, name=str(n)) for n in (9, 8, 7)]
    no_anchor = sample_of(5, mask=torch.zeros(5, dtype=torch.bool))
    batches = [
        batch_of(samples, row_tokens=24, max_documents=4)
        for samples in (full, full[:1], [no_anchor], [])
    ]
    shapes = [{n: (t.shape, t.dtype) for n, t in vars(b).items()} for b in batches]
    assert all(found == shapes[0] for found in shapes)
    assert shapes[0]["anchors_BA"][0] == (1, 16)
    for batch, used in zip(batches, (24, 9, 5, 0), strict=True):
        for states in (batch.features_BSF, batch.target_states_BSD):
            assert torch.count_nonzero(states[0, :used].abs().sum(1)) == used
            assert not states[0, used:].any()
        assert (batch.target_bounds_M2[:, 1] <= 24).all()


@pytest.mark.parametrize(("lengths", "row_tokens", "most"), [((9, 8), 16, 4), ((4, 4), 16, 1)])
def test_samples_that_do_not_fit_a_row_are_refused(lengths, row_tokens, most):
    samples = [sample_of(n, name=str(n)) for n in lengths]
    with pytest.raises(ValueError, match=f"2 samples of {sum(lengths)} tokens do not fit"):
        batch_of(samples, row_tokens=row_tokens, max_documents=most)
