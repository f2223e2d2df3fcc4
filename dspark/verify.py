"""Acceptance rules: which drafted tokens stand, and which token the target adds.

Pure functions. Shapes: B sequence, G drafted tokens, V vocabulary.

Source: Leviathan et al., arXiv 2211.17192 (rejection sampling); arXiv 2607.05147.
"""

from __future__ import annotations

import torch


def accept_greedy(
    target_argmax: torch.Tensor, drafts: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Accept the longest prefix that equals the target's own choice.

    Args:
        target_argmax: int64 [B, G+1], the target's choice after the anchor and after each draft.
        drafts: int64 [B, G].

    Returns:
        accepted drafts int64 [B], and the target's next token int64 [B].
    """
    same = (target_argmax[:, :-1] == drafts).long()
    num_accepted = same.cumprod(dim=1).sum(dim=1)
    return num_accepted, target_argmax.gather(1, num_accepted.unsqueeze(1)).squeeze(1)


def accept_sampled(
    target_probs: torch.Tensor,
    draft_probs: torch.Tensor,
    drafts: torch.Tensor,
    accept_uniforms: torch.Tensor,
    final_uniforms: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Token-by-token rejection sampling; the result is distributed as the target's own samples.

    Draft k is accepted with probability min(1, p(x_k) / q(x_k)). At the first rejection the next
    token is drawn from the normalised positive part of p - q, after a full block from p.

    Args:
        target_probs: [B, G+1, V]; draft_probs: [B, G, V], the distribution each draft was drawn
            from; drafts: int64 [B, G].
        accept_uniforms: [B, G] and final_uniforms: [B], in [0, 1).

    Returns:
        accepted drafts int64 [B], and the next token int64 [B].
    """
    places = drafts.unsqueeze(-1)
    p = target_probs[:, :-1].gather(2, places).squeeze(2)
    q = draft_probs.gather(2, places).squeeze(2)
    accepted = (accept_uniforms * q < p).long()
    num_accepted = accepted.cumprod(dim=1).sum(dim=1)
    rows = torch.arange(drafts.shape[0], device=drafts.device)
    final = target_probs[rows, num_accepted]
    rejected = num_accepted < drafts.shape[1]
    if rejected.any():
        at = rows[rejected]
        residual = (final[at] - draft_probs[at, num_accepted[at]]).clamp_(min=0.0)
        # p equal to q up to rounding leaves nothing: any draw from p is then as good.
        empty = residual.sum(-1, keepdim=True) <= 0.0
        final = final.clone()
        final[at] = torch.where(empty, final[at], residual)
    return num_accepted, draw(final, final_uniforms)


def draw(weights: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """One index per row in proportion to weights [B, V], by inversion; uniforms [B] in [0, 1)."""
    sums = weights.double().cumsum(dim=-1)
    threshold = uniforms.double().unsqueeze(1) * sums[:, -1:]
    index = torch.searchsorted(sums, threshold, right=True).squeeze(1)
    return index.clamp_(max=weights.shape[1] - 1)
