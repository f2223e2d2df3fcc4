"""Alignment of label and target state stated exactly, and windows cut into micro-batches."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from draft_testing import random_draft, tiny_config

from dspark import training
from dspark.batch import (
    TrainingBatch,
    TrainingSample,
    batch_denominators,
    lay_out,
    previous_tokens,
)
from dspark.model import DSparkDraft
from dspark.objective import ObjectiveConfig
from dspark.training import DraftWithLoss

CONFIG = tiny_config(markov_rank=0)
WIDTH, BLOCK = CONFIG.hidden_size, CONFIG.block_size


@dataclass(frozen=True)
class Taught(TrainingSample):
    """A sample beside its states."""

    features_SF: torch.Tensor
    target_states_SD: torch.Tensor


def make_sample(name: str, length: int, seed: int) -> Taught:
    generator = torch.Generator().manual_seed(seed)
    return Taught(
        sample_id=name,
        epoch=1,
        token_ids_S=torch.randint(CONFIG.vocab_size, (length,), generator=generator),
        loss_mask_S=torch.rand(length, generator=generator) < 0.85,
        features_SF=torch.randn(length, CONFIG.num_context_features, generator=generator),
        target_states_SD=torch.randn(length, WIDTH, generator=generator),
    )


def make_batch(samples: list[Taught]) -> TrainingBatch:
    layout = lay_out(samples, num_anchors=5, block_size=BLOCK, seed=3)
    states = [(s.features_SF, s.target_states_SD) for s in samples]
    into = layout.empty_states(CONFIG.num_context_features, WIDTH, torch.float32)
    return layout.with_states(states, into)


def make_model(objective: ObjectiveConfig) -> DraftWithLoss:
    generator = torch.Generator().manual_seed(0)
    head = torch.randn(CONFIG.vocab_size, WIDTH, generator=generator) * 0.4
    return DraftWithLoss(random_draft(CONFIG), head, head, objective)


SAMPLES = [make_sample(str(i), length, i) for i, length in enumerate((17, 9, 30, 12))]


@pytest.mark.parametrize("shift", [-1, 0, 1])
def test_row_g_is_compared_with_the_state_at_anchor_plus_g(
    shift: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A draft whose row g is the target's own state at p+g is always accepted, any other not."""
    model = make_model(ObjectiveConfig())

    batch = make_batch(SAMPLES)
    places = batch.anchors_BA.unsqueeze(2) + torch.arange(BLOCK) + shift
    places = places.clamp(0, batch.target_states_BSD.shape[1] - 1)
    hidden = batch.target_states_BSD[torch.arange(places.shape[0]).view(-1, 1, 1), places]

    def rows(draft: DSparkDraft, *_: object) -> tuple[torch.Tensor | None, ...]:
        prev = previous_tokens(batch)
        return (
            hidden,
            draft.markov_features(hidden, prev),
            draft.confidence_logits(hidden, prev),
        )

    monkeypatch.setattr(training, "_draft_rows", rows)
    metrics = model(batch, 1.0, 1.0).metrics
    alpha = metrics["alpha_sum"] / metrics["valid_count"]
    if shift:
        assert alpha.max() < 0.9
    else:
        torch.testing.assert_close(alpha, torch.ones(BLOCK), rtol=0.0, atol=1e-5)


@pytest.mark.parametrize("weighting", ["decay", "credit", "dpace"])
@pytest.mark.parametrize("cuts", [[2, 2], [1, 3], [1, 1, 1, 1]])
def test_a_window_may_be_cut_anywhere(cuts: list[int], weighting: str) -> None:
    """Division by the window's total makes the gradient one of the samples, not of the cuts."""
    objective = ObjectiveConfig(position_weights=weighting)
    window = make_batch(SAMPLES)
    totals = batch_denominators(window, objective)
    whole, parts = make_model(objective), make_model(objective)
    whole(window, 1.0 / totals[0], 1.0 / totals[1]).loss.backward()
    sums = [torch.zeros((), dtype=torch.float64)] * 2
    first = 0
    for count in cuts:
        batch = make_batch(SAMPLES[first : first + count])
        first += count
        parts(batch, 1.0 / totals[0], 1.0 / totals[1]).loss.backward()
        sums = [a + b for a, b in zip(sums, batch_denominators(batch, objective), strict=True)]
    # The weights are float32, their sums float64.
    torch.testing.assert_close(torch.stack(sums), torch.stack(list(totals)), rtol=1e-6, atol=0.0)
    wanted = dict(whole.named_parameters())
    for name, parameter in parts.named_parameters():
        assert parameter.grad is not None, name
        error = (parameter.grad - wanted[name].grad).norm() / wanted[name].grad.norm()
        assert error < 1e-5, name
