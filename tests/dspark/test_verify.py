"""The acceptance rules: exact cases, and exact distributions by a chi-square test."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from decoder_testing import chi_square_p_value
from torch import Tensor

from dspark.verify import accept_greedy, accept_sampled, draw

VOCAB, BLOCK, SAMPLES = 4, 2, 60_000
REJECT_BELOW, ACCEPT_ABOVE = 1e-6, 1e-3
Rule = Callable[..., tuple[Tensor, Tensor]]


def test_greedy_accepts_the_longest_equal_prefix() -> None:
    choice = torch.tensor([[5, 6, 7, 8], [5, 6, 7, 8], [5, 6, 7, 8], [5, 6, 7, 8]])
    drafts = torch.tensor([[5, 6, 7], [5, 0, 7], [0, 6, 7], [5, 6, 0]])
    accepted, following = accept_greedy(choice, drafts)
    assert accepted.tolist() == [3, 1, 0, 2]
    assert following.tolist() == [8, 6, 5, 7]


def test_greedy_without_drafts_gives_the_targets_choice() -> None:
    accepted, following = accept_greedy(torch.tensor([[4], [9]]), torch.zeros(2, 0).long())
    assert accepted.tolist() == [0, 0]
    assert following.tolist() == [4, 9]


def test_draw_inverts_the_cumulative_sum() -> None:
    weights = torch.tensor([[0.0, 2.0, 0.0, 2.0, 0.0]])
    for uniform, index in [(0.0, 1), (0.49, 1), (0.5, 3), (0.999999, 3)]:
        assert draw(weights, torch.tensor([uniform])).tolist() == [index]


def test_draw_never_takes_an_index_of_weight_zero_at_the_largest_uniform() -> None:
    largest = torch.tensor([1.0 - 2.0**-53], dtype=torch.float64)
    for seed in range(200):
        weights = torch.rand(1, 50, generator=torch.Generator().manual_seed(seed)) * 3.0
        weights[0, -1] = 0.0
        assert weights[0, draw(weights, largest)] > 0.0


def test_sampled_edges_of_the_rule() -> None:
    p = torch.tensor([[0.5, 0.5, 0.0, 0.0], [0.0, 0.0, 1.0, 0.0]])
    q = torch.tensor([[0.0, 1.0, 0.0, 0.0]])
    # p(x)/q(x) = 1/2: accepted just below it, rejected at it. The residual holds token 0 alone.
    for uniform, accepted, following in [(0.499, 1, 2), (0.5, 0, 0)]:
        got = accept_sampled(
            p.unsqueeze(0),
            q.unsqueeze(0),
            torch.tensor([[1]]),
            torch.tensor([[uniform]]),
            torch.tensor([0.9]),
        )
        assert [x.tolist() for x in got] == [[accepted], [following]]


def test_sampled_with_equal_distributions_accepts_everything() -> None:
    p = torch.softmax(torch.randn(8, BLOCK + 1, VOCAB), -1)
    drafts = torch.randint(0, VOCAB, (8, BLOCK))
    uniforms = torch.full((8, BLOCK), 1.0 - 2.0**-53, dtype=torch.float64)
    accepted, _ = accept_sampled(p, p[:, :-1], drafts, uniforms, torch.rand(8))
    assert accepted.tolist() == [BLOCK] * 8


# --- distributions -----------------------------------------------------------------------------


def _toy() -> tuple[Tensor, Tensor]:
    """First-order target and draft: rows of [V, V] transition matrices, and a start token 0."""
    generator = torch.Generator().manual_seed(3)
    target = torch.softmax(1.5 * torch.randn(VOCAB, VOCAB, generator=generator), -1)
    draft = torch.softmax(1.5 * torch.randn(VOCAB, VOCAB, generator=generator), -1)
    return target, draft


def _first_tokens(rule: Rule) -> Tensor:
    """Counts [V**3] of the first three tokens after token 0, drafted in blocks and verified."""
    target, draft = _toy()
    generator = torch.Generator().manual_seed(11)

    def uniforms(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator, dtype=torch.float64)

    tokens = torch.zeros(SAMPLES, 1, dtype=torch.int64)
    filled = torch.zeros(SAMPLES, dtype=torch.int64)
    tokens = torch.cat([tokens, torch.zeros(SAMPLES, 3 + BLOCK + 1, dtype=torch.int64)], 1)
    while (filled < 3).any():
        anchor = tokens.gather(1, filled.unsqueeze(1)).squeeze(1)
        window = [anchor]
        for _ in range(BLOCK):
            window.append(draw(draft[window[-1]], uniforms(SAMPLES)))
        context = torch.stack(window, 1)
        accepted, following = rule(
            target[context],
            draft[context[:, :-1]],
            context[:, 1:],
            uniforms(SAMPLES, BLOCK),
            uniforms(SAMPLES),
        )
        active = filled < 3
        for row in range(BLOCK + 1):
            value = following if row == BLOCK else context[:, row + 1]
            value = torch.where(accepted == row, following, value)
            write = active & (row <= accepted)
            place = (filled + 1 + row).clamp(max=tokens.shape[1] - 1)
            old = tokens.gather(1, place.unsqueeze(1)).squeeze(1)
            tokens.scatter_(1, place.unsqueeze(1), torch.where(write, value, old).unsqueeze(1))
        filled = torch.where(active, filled + accepted + 1, filled)
    codes = (tokens[:, 1] * VOCAB + tokens[:, 2]) * VOCAB + tokens[:, 3]
    return torch.bincount(codes, minlength=VOCAB**3)


def _joint() -> Tensor:
    target, _ = _toy()
    first = target[0]
    return (first[:, None, None] * target[:, :, None] * target[None, :, :]).reshape(-1)


def _bonus_instead_of_residual(
    p: Tensor, q: Tensor, drafts: Tensor, accept_uniforms: Tensor, final_uniforms: Tensor
) -> tuple[Tensor, Tensor]:
    """Wrong: draws from p, not from the residual, at a rejection."""
    accepted, _ = accept_sampled(p, q, drafts, accept_uniforms, final_uniforms)
    return accepted, draw(p[torch.arange(len(p)), accepted], final_uniforms)


def _accept_by_target_probability(
    p: Tensor, q: Tensor, drafts: Tensor, accept_uniforms: Tensor, final_uniforms: Tensor
) -> tuple[Tensor, Tensor]:
    """Wrong: accepts with probability p(x), not p(x) / q(x)."""
    drafted = q.gather(2, drafts.unsqueeze(-1)).squeeze(2)
    return accept_sampled(p, q, drafts, accept_uniforms / drafted, final_uniforms)


def _accept_everything(
    p: Tensor, q: Tensor, drafts: Tensor, accept_uniforms: Tensor, final_uniforms: Tensor
) -> tuple[Tensor, Tensor]:
    """Wrong: takes the draft's word for everything."""
    accepted = torch.full((len(p),), drafts.shape[1])
    return accepted, draw(p[:, -1], final_uniforms)


def test_sampled_output_is_distributed_as_the_targets_own() -> None:
    assert chi_square_p_value(_first_tokens(accept_sampled), _joint()) > ACCEPT_ABOVE


@pytest.mark.parametrize(
    "wrong", [_bonus_instead_of_residual, _accept_by_target_probability, _accept_everything]
)
def test_the_statistic_rejects_wrong_rules(wrong: Rule) -> None:
    assert chi_square_p_value(_first_tokens(wrong), _joint()) < REJECT_BELOW


def test_accept_rate_is_the_overlap_of_the_distributions() -> None:
    target, draft = _toy()
    generator = torch.Generator().manual_seed(5)
    drafts = draw(draft[:1].expand(SAMPLES, -1), torch.rand(SAMPLES, generator=generator))
    accepted, _ = accept_sampled(
        torch.stack([target[0], target[1]]).expand(SAMPLES, 2, VOCAB),
        draft[:1].expand(SAMPLES, 1, VOCAB),
        drafts.unsqueeze(1),
        torch.rand(SAMPLES, 1, generator=generator),
        torch.rand(SAMPLES, generator=generator),
    )
    overlap = float(torch.minimum(target[0], draft[0]).sum())
    counts = torch.tensor([int((accepted == 1).sum()), int((accepted == 0).sum())])
    assert chi_square_p_value(counts, torch.tensor([overlap, 1 - overlap])) > ACCEPT_ABOVE
