"""A micro-batch from its rows to the loss.

Shapes: B row, S position, A anchor, G block position, D hidden, F context features.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import nn

from dspark.attention import ContextBounds, Visible, context_mask
from dspark.batch import TrainingBatch, previous_tokens
from dspark.fused import Float8Weight
from dspark.model import DSparkDraft
from dspark.objective import ObjectiveConfig, ObjectiveResult, fused_objective


def block_embeddings(
    embedding_VD: torch.Tensor, anchor_tokens: torch.Tensor, mask_token_id: int, block_size: int
) -> torch.Tensor:
    """Embeddings of [anchor, MASK, ..., MASK], [..., G, D] for anchor tokens [...]."""
    anchor = F.embedding(anchor_tokens, embedding_VD).unsqueeze(-2)
    mask = embedding_VD[mask_token_id].expand(*anchor_tokens.shape, block_size - 1, -1)
    return torch.cat([anchor, mask], dim=-2)


class DraftWithLoss(nn.Module):
    """The draft together with the frozen tensors and the objective, for an optimizer's engine.

    Embedding and lm_head are no parameters, not in the state dict, and keep their type when the
    module is cast: they move between devices only.
    """

    embedding: torch.Tensor
    lm_head: torch.Tensor

    def __init__(
        self,
        draft: DSparkDraft,
        embedding_VD: torch.Tensor,
        lm_head_VD: torch.Tensor,
        config: ObjectiveConfig,
    ) -> None:
        super().__init__()
        self.draft = draft
        self.config = config
        self.register_buffer("embedding", embedding_VD, persistent=False)
        self.register_buffer("lm_head", lm_head_VD, persistent=False)
        self._float8: Float8Weight | None = None

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        embedding, lm_head = self.embedding, self.lm_head
        super()._apply(fn, recurse)
        self.embedding = embedding.to(self.embedding.device)
        # Tied tensors stay one tensor: a copy of each would take the memory twice.
        self.lm_head = self.embedding if lm_head is embedding else lm_head.to(self.lm_head.device)
        self._float8 = None
        if self.config.float8_logits and self.lm_head.is_cuda:
            self._float8 = Float8Weight.of(self.lm_head)
        return self

    def forward(
        self,
        batch: TrainingBatch,
        term_scale: float | torch.Tensor,
        confidence_scale: float | torch.Tensor,
    ) -> ObjectiveResult:
        """Loss of one micro-batch; see `fused_objective` for the scales."""
        draft, block = self.draft, batch.block_size
        prev_BAG = previous_tokens(batch)
        on_gpu = batch.features_BSF.is_cuda
        num_slots = batch.token_ids_BS.shape[1]
        bounds = ContextBounds(batch.context_start_BA, batch.anchors_BA)
        visible = bounds if on_gpu else context_mask(*bounds, num_slots)
        run = _compiled_rows() if on_gpu else _draft_rows
        hidden_BAGD, features, confidence = run(
            draft,
            batch.features_BSF,
            batch.positions_BS,
            batch.anchors_BA,
            block_embeddings(self.embedding, prev_BAG[:, :, 0], draft.config.mask_token_id, block),
            prev_BAG,
            visible,
            self.config.detach_confidence_input,
        )
        width = hidden_BAGD.shape[-1]
        return fused_objective(
            hidden_BAGD.reshape(-1, width),
            None if features is None else features.reshape(-1, features.shape[-1]),
            self.lm_head,
            None if draft.markov_head is None else draft.markov_head.markov_w2.weight,
            batch.target_states_BSD.reshape(-1, width)[batch.target_slots_U],
            batch.target_of_row_N,
            batch.labels_BAG.reshape(-1),
            batch.valid_BAG.reshape(-1),
            confidence.reshape(-1),
            target_bounds_M2=batch.target_bounds_M2,
            lm_head_float8=self._float8,
            block_size=block,
            config=self.config,
            term_scale=term_scale,
            confidence_scale=confidence_scale,
        )


def _draft_rows(
    draft: DSparkDraft,
    states_BSF: torch.Tensor,
    positions_BS: torch.Tensor,
    anchors_BA: torch.Tensor,
    block_embeds_BAGD: torch.Tensor,
    prev_BAG: torch.Tensor,
    visible: Visible,
    detach_confidence_input: bool,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """All of the draft before the vocabulary: hidden states, Markov features, confidence logits."""
    context = draft.context_kv(states_BSF, positions_BS)
    hidden_BAGD = draft.forward_blocks(
        block_embeds_BAGD, positions_BS.gather(1, anchors_BA), context, visible
    )
    features = draft.markov_features(hidden_BAGD, prev_BAG)
    confidence = draft.confidence_logits(
        hidden_BAGD, prev_BAG, detach_input=detach_confidence_input
    )
    return hidden_BAGD, features, confidence


@cache
def _compiled_rows() -> Callable[..., Any]:
    """`_draft_rows` for GPUs, compiled once for each shape that occurs; there should be one."""
    # Beyond its limit of shapes, dynamo would go on uncompiled without a word.
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    return torch.compile(_draft_rows, dynamic=False)
