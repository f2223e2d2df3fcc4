"""Would this draft have proposed these tokens? A check of another implementation's weights."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dspark.model import DSparkDraft
from dspark.training import block_embeddings


@torch.no_grad()
def proposal_margins(
    draft: DSparkDraft,
    embedding_VD: torch.Tensor,
    lm_head_VD: torch.Tensor,
    features_SF: torch.Tensor,
    token_ids: Sequence[int],
) -> list[float]:
    """How far below the draft's own choice each proposed token lies, in logits; 0 is the choice.

    Each position is judged after the tokens proposed before it, so one difference does not spoil
    the rest.

    Args:
        features_SF: the target's states of the prompt, which the anchor follows.
        token_ids: the anchor, then G drafts.
    """
    block, prompt = draft.config.block_size, features_SF.shape[0]
    if len(token_ids) != block + 1:
        raise ValueError(
            f"proposal: {len(token_ids)} tokens; allowed: {block + 1}, the anchor and block_size "
            "drafts; compare with the draft that is being served"
        )
    device = features_SF.device
    tokens = torch.tensor([list(token_ids)], device=device)
    positions = torch.arange(prompt, device=device).unsqueeze(0)
    context = draft.context_kv(features_SF.unsqueeze(0), positions)
    embeds = block_embeddings(embedding_VD, tokens[:, 0], draft.config.mask_token_id, block)
    hidden_BGD = draft.forward_blocks(
        embeds.unsqueeze(1),
        torch.full((1, 1), prompt, device=device),
        context,
        torch.ones(1, 1, prompt, dtype=torch.bool, device=device),
    ).squeeze(1)
    margins, state = [], None
    for g in range(block):
        features, state = draft.markov_step(hidden_BGD[:, g], tokens[:, g], state)
        logits = hidden_BGD[:, g] @ lm_head_VD.t()
        if features is not None and draft.markov_head is not None:
            logits = torch.addmm(logits, features, draft.markov_head.markov_w2.weight.t())
        row = logits[0].float()
        margins.append(float(row.max() - row[token_ids[g + 1]]))
    return margins
