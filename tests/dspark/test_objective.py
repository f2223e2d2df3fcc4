"""The fused objective against a float64 autograd reference: values and every gradient."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from reference_objective import Inputs, reference_objective

from dspark.objective import (
    ObjectiveConfig,
    ObjectiveResult,
    decay_weights,
    fused_objective,
    objective_denominators,
    position_weights,
)

TERMS = ("ce", "l1", "nla", "kl", "lk_hybrid", "accept_onpolicy")
WEIGHTINGS = ("decay", "credit", "dpace")
V, D, RANK, STATES = 37, 11, 5, 9

# Error over the largest entry of the reference. Softmax and statistics are float32 whatever the
# inputs are, so float64 inputs gain nothing over that; observed errors are a third or less.
TOLERANCE = {torch.float64: 2e-6, torch.float32: 1e-5, torch.bfloat16: 4e-2}

PREFIXES = {
    3: (3, 0, 1, 2, 0, 3, 3),
    5: (5, 0, 2, 4, 0, 1, 5),
}
"""Valid rows of each block: full, none, and parts."""


def one_term(term: str, **settings: Any) -> ObjectiveConfig:
    weights = {name: 0.7 if name == term else 0.0 for name in TERMS}
    return ObjectiveConfig(**{**weights, "confidence": 0.6, **settings})


def make_inputs(block: int, *, markov: bool = True, seed: int = 0, scale: float = 1.0) -> Inputs:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64) * scale

    rows = len(PREFIXES[block]) * block
    valid = [g < prefix for prefix in PREFIXES[block] for g in range(block)]
    # Neighbouring anchors share positions of the target, far more rows than states.
    index = torch.randint(STATES, (rows,), generator=generator)
    labels = torch.randint(V, (rows,), generator=generator)
    return Inputs(
        hidden=normal(rows, D),
        features=normal(rows, RANK) if markov else None,
        lm_head=normal(V, D) * 0.5,
        w2=normal(V, RANK) * 0.5 if markov else None,
        states=normal(STATES, D),
        index=index,
        labels=labels,
        valid=torch.tensor(valid),
        confidence=normal(rows),
    )


def run_fused(
    x: Inputs,
    config: ObjectiveConfig,
    block: int,
    term_scale: float | torch.Tensor = 1.0,
    confidence_scale: float | torch.Tensor = 1.0,
) -> ObjectiveResult:
    return fused_objective(
        x.hidden,
        x.features,
        x.lm_head,
        x.w2,
        x.states,
        x.index,
        x.labels,
        x.valid,
        x.confidence,
        block_size=block,
        config=config,
        term_scale=term_scale,
        confidence_scale=confidence_scale,
    )


def assert_near(ours: torch.Tensor, wanted: torch.Tensor, tolerance: float, name: str) -> None:
    error = (ours.double() - wanted.double()).abs().max()
    size = wanted.double().abs().max().clamp(min=1e-3)
    assert float(error / size) < tolerance, f"{name}: {float(error / size):.2e}"


def compare(
    x: Inputs, config: ObjectiveConfig, block: int, dtype: torch.dtype, upstream: float = 1.0
) -> None:
    """Loss and gradients; the reference sees the same rounded inputs."""
    ours = x.to(dtype)
    if ours.confidence is not None:
        ours.confidence = ours.confidence.detach().float().requires_grad_()
    rounded = ours.to(torch.float64)
    result = run_fused(ours, config, block, 0.31, 0.17)
    wanted, _ = reference_objective(rounded, config, block, 0.31, 0.17)
    (result.loss * upstream).backward()
    (wanted * upstream).backward()
    assert_near(result.loss.detach(), wanted.detach(), TOLERANCE[dtype], "loss")
    expected = rounded.leaves()
    for name, leaf in ours.leaves().items():
        assert leaf.grad is not None, name
        assert leaf.grad.dtype == leaf.dtype
        assert_near(leaf.grad, expected[name].grad, TOLERANCE[dtype], name)


@pytest.mark.parametrize("block", [3, 5])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("markov", [True, False])
@pytest.mark.parametrize("weighting", WEIGHTINGS)
@pytest.mark.parametrize("term", TERMS)
def test_each_term_equals_the_reference(
    term: str, weighting: str, markov: bool, temperature: float, block: int
) -> None:
    if term == "accept_onpolicy" and weighting == "decay":
        pytest.skip("an average over blocks is not divided by decayed weights")
    config = one_term(term, position_weights=weighting, temperature=temperature, chunk_rows=8)
    x = make_inputs(block, markov=markov)
    compare(x, config, block, torch.float64)
    compare(x, config, block, torch.float32)


@pytest.mark.parametrize("weighting", WEIGHTINGS)
@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_a_mixture_with_upstream_gradient_equals_the_reference(
    dtype: torch.dtype, weighting: str
) -> None:
    config = ObjectiveConfig(
        ce=0.2, l1=0.5, nla=0.3, kl=0.4, lk_hybrid=0.6, eta=2.0, confidence=0.9,
        position_weights=weighting, decay=2.5, credit_floor=0.35, dpace_smoothing=0.25,
        temperature=0.8, chunk_rows=7,
    )  # fmt: skip
    compare(make_inputs(5, seed=3), config, 5, dtype, upstream=-3.7)


@pytest.mark.parametrize("term", TERMS)
def test_distributions_that_hardly_overlap(term: str) -> None:
    x = make_inputs(3, seed=4, scale=3.0)
    compare(x, one_term(term, position_weights="credit"), 3, torch.float64)


def test_scales_may_be_tensors() -> None:
    x = make_inputs(3)
    config = ObjectiveConfig()
    by_number, by_tensor = x.to(torch.float32), x.to(torch.float32)
    run_fused(by_number, config, 3, 0.25, 0.5).loss.backward()
    run_fused(by_tensor, config, 3, torch.tensor(0.25), torch.tensor(0.5)).loss.backward()
    for name, leaf in by_number.leaves().items():
        assert torch.equal(leaf.grad, by_tensor.leaves()[name].grad)


@pytest.mark.parametrize("weighting", WEIGHTINGS)
def test_chunks_do_not_matter(weighting: str) -> None:
    results = []
    for chunk_rows in (1, 3, 4, 10, 17, 21, 10_000):
        x = make_inputs(3, seed=1).to(torch.float64)
        config = ObjectiveConfig(nla=0.2, position_weights=weighting, chunk_rows=chunk_rows)
        result = run_fused(x, config, 3)
        result.loss.backward()
        results.append([result.loss.detach(), *(leaf.grad for leaf in x.leaves().values())])
        assert result.metrics["valid_count"].tolist() == [5.0, 4.0, 3.0]
    for other in results[1:]:
        for ours, wanted in zip(other, results[0], strict=True):
            torch.testing.assert_close(ours, wanted, rtol=1e-6, atol=1e-7)


def test_rows_without_labels_change_nothing() -> None:
    """Whatever stands in masked rows, NaN included, reaches no result and no gradient."""
    plain, dirty = make_inputs(5, seed=2), make_inputs(5, seed=2)
    assert dirty.features is not None
    masked = ~dirty.valid
    dirty.hidden[masked] = math.nan
    dirty.features[masked] = math.nan
    dirty.index[masked] = 0
    dirty.labels[masked] = 0
    config = ObjectiveConfig(kl=0.1, position_weights="credit")
    a, b = plain.to(torch.float32), dirty.to(torch.float32)
    first, second = run_fused(a, config, 5), run_fused(b, config, 5)
    first.loss.backward()
    second.loss.backward()
    assert torch.equal(first.loss, second.loss)
    for name, leaf in a.leaves().items():
        assert torch.equal(leaf.grad, b.leaves()[name].grad), name
    for name in ("hidden", "features", "confidence"):
        assert not a.leaves()[name].grad[masked].any(), name


@pytest.mark.parametrize("weighting", WEIGHTINGS)
def test_nothing_valid_gives_zero_loss_and_zero_gradients(weighting: str) -> None:
    x = make_inputs(3)
    x.valid = torch.zeros_like(x.valid)
    x = x.to(torch.float32)
    config = ObjectiveConfig(position_weights=weighting)
    result = run_fused(x, config, 3)
    result.loss.backward()
    assert float(result.loss.detach()) == 0.0
    for name, leaf in x.leaves().items():
        assert leaf.grad is not None and not leaf.grad.any(), name
    assert all(not value.any() for value in result.metrics.values())
    terms, confidence = objective_denominators(config, x.valid.view(-1, 3))
    assert float(terms) == float(confidence) == 0.0


def test_fresh_memory_is_never_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def poisoned(maker: Any) -> Any:
        def make(*args: Any, **settings: Any) -> torch.Tensor:
            made = maker(*args, **settings)
            return made.fill_(math.nan) if made.is_floating_point() else made

        return make

    for name in ("empty", "empty_like"):
        monkeypatch.setattr(torch, name, poisoned(getattr(torch, name)))
    x = make_inputs(3).to(torch.float32)
    result = run_fused(x, ObjectiveConfig(nla=0.1, kl=0.1, temperature=0.7), 3)
    result.loss.backward()
    assert torch.isfinite(result.loss)
    assert all(torch.isfinite(leaf.grad).all() for leaf in x.leaves().values())


def test_metrics_are_sums_over_rows() -> None:
    block = 5
    x = make_inputs(block, seed=5).to(torch.float64)
    config = ObjectiveConfig(kl=0.1, position_weights="credit")
    metrics = run_fused(x, config, block).metrics
    _, found = reference_objective(x, config, block)
    rows = {name: torch.tensor(values).view(-1, block) for name, values in found.items()}
    alpha = rows["alpha"]
    near: dict[str, Any] = {
        "ce_sum": (rows["ce"] * rows["weight"]).sum(),
        "l1_sum": (rows["l1"] * rows["weight"]).sum(),
        "weight_sum": rows["weight"].sum(),
        "alpha_sum": alpha.sum(0),
        # One per block that has labels for the target's own token, and the survival of each draft.
        "expected_accept_sum": alpha.cumprod(1).sum() + 5,
        "block_count": torch.tensor(5.0),
    }
    for name, wanted in near.items():
        torch.testing.assert_close(metrics[name], wanted.float(), rtol=1e-5, atol=1e-6, msg=name)
    assert all(not value.requires_grad for value in metrics.values())


def test_hits_count_the_first_choice() -> None:
    x = make_inputs(3, markov=False).to(torch.float32)
    choice = (x.hidden @ x.lm_head.t()).argmax(-1).detach()
    x.labels = torch.where(torch.arange(21) % 2 == 0, choice, (choice + 1) % V)
    hits = run_fused(x, ObjectiveConfig(), 3).metrics["hit_sum"]
    even = (torch.arange(21) % 2 == 0) & x.valid
    assert hits.tolist() == even.view(-1, 3).sum(0).tolist()


# --- confidence ----------------------------------------------------------------------------------


def test_the_confidence_loss_moves_the_confidence_head_alone() -> None:
    """alpha is its target, not something to be moved towards the head's opinion."""
    with_loss, without = make_inputs(3).to(torch.float32), make_inputs(3).to(torch.float32)
    run_fused(with_loss, ObjectiveConfig(confidence=5.0), 3).loss.backward()
    without.confidence = None
    run_fused(without, ObjectiveConfig(confidence=5.0), 3).loss.backward()
    for name, leaf in without.leaves().items():
        assert torch.equal(leaf.grad, with_loss.leaves()[name].grad), name


def test_confidence_is_best_at_alpha() -> None:
    x = make_inputs(3, seed=6).to(torch.float32)
    config = ObjectiveConfig(confidence=1.0)
    _, found = reference_objective(x.to(torch.float64), config, 3)
    x.confidence = torch.logit(torch.tensor(found["alpha"])).nan_to_num().requires_grad_()
    run_fused(x, config, 3).loss.backward()
    assert x.confidence.grad.abs().max() < 1e-5


# --- weights and denominators --------------------------------------------------------------------


def test_decayed_weights_start_at_one() -> None:
    weights = decay_weights(4, 2.0)
    assert float(weights[0]) == 1.0
    wanted = torch.tensor([math.exp(-k / 2.0) for k in range(4)])
    torch.testing.assert_close(weights, wanted)


def test_weights_by_hand() -> None:
    valid = torch.tensor([[True, True, True], [True, False, False], [False, False, False]])
    alpha = torch.tensor([[0.5, 0.5, 0.5], [0.25, 9.0, 9.0], [9.0, 9.0, 9.0]])
    label_q = torch.tensor([[0.0, 1.0, 0.5], [0.5, 9.0, 9.0], [9.0, 9.0, 9.0]])
    base = ObjectiveConfig(decay=1.0, credit_floor=0.0, dpace_smoothing=0.5)
    e = math.exp(-1.0)
    table = {
        "decay": [[1.0, e, e * e], [1.0, 0.0, 0.0], [0.0] * 3],
        "credit": [[0.875, 0.375, 0.125], [0.25, 0.0, 0.0], [0.0] * 3],
        # Smoothed factors 0.5, 1, 0.75 and 0.75.
        "dpace": [[1.375, 0.875, 0.375], [0.75, 0.0, 0.0], [0.0] * 3],
    }
    for weighting, wanted in table.items():
        config = dataclasses.replace(base, position_weights=weighting)
        ours = position_weights(config, alpha, label_q, valid)
        torch.testing.assert_close(ours, torch.tensor(wanted), msg=weighting)
    floored = dataclasses.replace(base, position_weights="credit", credit_floor=1.0)
    torch.testing.assert_close(
        position_weights(floored, alpha, label_q, valid), torch.tensor(table["decay"])
    )


@pytest.mark.parametrize("weighting", WEIGHTINGS)
def test_denominators(weighting: str) -> None:
    valid = torch.tensor([[True, True, False], [True, False, False], [False, False, False]])
    config = ObjectiveConfig(position_weights=weighting, decay=2.0)
    terms, confidence = objective_denominators(config, valid)
    decayed = 2.0 + math.exp(-0.5)
    assert terms.dtype == confidence.dtype == torch.float64
    assert float(confidence) == pytest.approx(decayed, rel=1e-6)
    # Credit is divided by blocks: by its own sum the credit would cancel.
    assert float(terms) == pytest.approx(decayed if weighting == "decay" else 2.0, rel=1e-6)


# --- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("ce", -0.1),
        ("eta", -1.0),
        ("confidence", -1.0),
        ("position_weights", "linear"),
        ("decay", 0.0),
        ("temperature", 0.0),
        ("chunk_rows", -1),
        ("credit_floor", 1.5),
        ("dpace_smoothing", -0.5),
        ("nla", math.nan),
    ],
)
def test_settings_out_of_range_are_named(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=rf"objective\.{field}="):
        ObjectiveConfig(**{field: value})


def test_an_objective_without_terms_is_refused() -> None:
    with pytest.raises(ValueError, match="all 0"):
        ObjectiveConfig(ce=0.0, l1=0.0)


def test_rows_that_are_no_whole_blocks_are_refused() -> None:
    with pytest.raises(ValueError, match="whole number of blocks"):
        run_fused(make_inputs(3).to(torch.float32), ObjectiveConfig(), 4)


@pytest.mark.parametrize("name", ["lm_head", "states"])
def test_the_target_gets_no_gradient(name: str) -> None:
    x = make_inputs(3).to(torch.float32)
    getattr(x, name).requires_grad_()
    with pytest.raises(ValueError, match="frozen"):
        run_fused(x, ObjectiveConfig(), 3)
