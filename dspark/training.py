"""A micro-batch from samples to loss.

Shapes: B sequence, S position, A anchor, G block position, D hidden, F context features.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

import torch
import torch.nn.functional as F
from torch import nn

from dspark.anchors import block_labels, draw_anchors
from dspark.model import DSparkDraft
from dspark.objective import (
    ObjectiveConfig,
    ObjectiveResult,
    fused_objective,
    objective_denominators,
)


@dataclass(frozen=True)
class TrainingSample:
    """One document with the target's states of every token."""

    sample_id: str
    epoch: int
    token_ids_S: torch.Tensor
    """int64."""
    loss_mask_S: torch.Tensor
    """bool."""
    features_SF: torch.Tensor
    target_states_SD: torch.Tensor


@dataclass(frozen=True)
class TrainingBatch:
    """Padded samples with their anchors. Absent anchors have no valid label and see no context."""

    token_ids_BS: torch.Tensor
    features_BSF: torch.Tensor
    target_states_BSD: torch.Tensor
    anchors_BA: torch.Tensor
    labels_BAG: torch.Tensor
    valid_BAG: torch.Tensor

    @property
    def block_size(self) -> int:
        return self.labels_BAG.shape[2]


def collate(
    samples: Sequence[TrainingSample],
    *,
    num_anchors: int,
    block_size: int,
    seed: int,
    pad_multiple: int = 1,
    num_features: int,
    hidden_size: int,
    dtype: torch.dtype,
) -> TrainingBatch:
    """Draw each sample's anchors and pad to common shapes.

    Args:
        num_anchors: anchors per sample; the batch always has that many places.
        pad_multiple: sequences are padded to a multiple of this.
        num_features, hidden_size, dtype: of the states; an empty list of samples gives a batch of
            one padding sequence with no label, so that every rank of a step runs the same passes.
    """
    longest = max((s.token_ids_S.shape[0] for s in samples), default=1)
    length = -(-longest // pad_multiple) * pad_multiple
    batch = max(1, len(samples))
    token_ids = torch.zeros(batch, length, dtype=torch.int64)
    features = torch.zeros(batch, length, num_features, dtype=dtype)
    states = torch.zeros(batch, length, hidden_size, dtype=dtype)
    anchors = torch.zeros(batch, num_anchors, dtype=torch.int64)
    labels = torch.zeros(batch, num_anchors, block_size, dtype=torch.int64)
    valid = torch.zeros(batch, num_anchors, block_size, dtype=torch.bool)
    for row, sample in enumerate(samples):
        size = sample.token_ids_S.shape[0]
        token_ids[row, :size] = sample.token_ids_S
        features[row, :size] = sample.features_SF
        states[row, :size] = sample.target_states_SD
        drawn = draw_anchors(
            sample.loss_mask_S,
            num_anchors,
            seed=seed,
            epoch=sample.epoch,
            sample_id=sample.sample_id,
        )
        count = drawn.shape[0]
        anchors[row, :count] = drawn
        labels[row, :count], valid[row, :count] = block_labels(
            sample.token_ids_S, sample.loss_mask_S, drawn, block_size
        )
    return TrainingBatch(token_ids, features, states, anchors, labels, valid)


def batch_denominators(
    batch: TrainingBatch, config: ObjectiveConfig
) -> tuple[torch.Tensor, torch.Tensor]:
    """What this micro-batch adds to the window's total weights: terms and confidence, float64."""
    return objective_denominators(config, batch.valid_BAG.flatten(0, 1))


def previous_tokens(batch: TrainingBatch) -> torch.Tensor:
    """The data's token before each predicted one, int64 [B, A, G]: the anchor, then the labels."""
    anchor_tokens_BA = batch.token_ids_BS.gather(1, batch.anchors_BA)
    return torch.cat([anchor_tokens_BA.unsqueeze(2), batch.labels_BAG[:, :, :-1]], dim=2)


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

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        embedding, lm_head = self.embedding, self.lm_head
        super()._apply(fn, recurse)
        self.embedding = embedding.to(self.embedding.device)
        # Tied tensors stay one tensor: a copy of each would take the memory twice.
        self.lm_head = self.embedding if lm_head is embedding else lm_head.to(self.lm_head.device)
        return self

    def forward(
        self,
        batch: TrainingBatch,
        term_scale: float | torch.Tensor,
        confidence_scale: float | torch.Tensor,
    ) -> ObjectiveResult:
        """Loss of one micro-batch; see `fused_objective` for the scales."""
        draft, block = self.draft, batch.block_size
        hidden_BAGD = self._hidden(batch)
        prev_BAG = previous_tokens(batch)
        features = draft.markov_features(hidden_BAGD, prev_BAG)
        confidence = draft.confidence_logits(
            hidden_BAGD, prev_BAG, detach_input=self.config.detach_confidence_input
        )
        width, length = hidden_BAGD.shape[-1], batch.token_ids_BS.shape[1]
        # Row g predicts the token at p+1+g, whose distribution comes from the state at p+g.
        rows = torch.arange(batch.token_ids_BS.shape[0], device=hidden_BAGD.device) * length
        places = batch.anchors_BA.unsqueeze(2) + torch.arange(block, device=hidden_BAGD.device)
        index = rows.view(-1, 1, 1) + places.clamp(max=length - 1)
        result = fused_objective(
            hidden_BAGD.reshape(-1, width),
            None if features is None else features.reshape(-1, features.shape[-1]),
            self.lm_head,
            None if draft.markov_head is None else draft.markov_head.markov_w2.weight,
            batch.target_states_BSD.reshape(-1, width),
            index.reshape(-1),
            batch.labels_BAG.reshape(-1),
            batch.valid_BAG.reshape(-1),
            confidence.reshape(-1),
            block_size=block,
            config=self.config,
            term_scale=term_scale,
            confidence_scale=confidence_scale,
        )
        return result

    def _hidden(self, batch: TrainingBatch) -> torch.Tensor:
        draft, block = self.draft, batch.block_size
        length = batch.token_ids_BS.shape[1]
        positions_S = torch.arange(length, device=batch.token_ids_BS.device)
        context = draft.context_kv(
            batch.features_BSF, positions_S.expand(batch.token_ids_BS.shape[0], length)
        )
        anchor_tokens_BA = batch.token_ids_BS.gather(1, batch.anchors_BA)
        embeds = block_embeddings(
            self.embedding, anchor_tokens_BA, draft.config.mask_token_id, block
        )
        visible_BAS = positions_S.view(1, 1, -1) < batch.anchors_BA.unsqueeze(2)
        return draft.forward_blocks(embeds, batch.anchors_BA, context, visible_BAS)
