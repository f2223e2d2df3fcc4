"""A micro-batch from samples to loss.

Shapes: B sequence, S position, A anchor, G block position, D hidden, F context features.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import nn

from dspark.anchors import block_labels, draw_anchors
from dspark.attention import Visible, block_mask, context_mask
from dspark.fused import Float8Weight
from dspark.model import DSparkDraft
from dspark.objective import (
    ObjectiveConfig,
    ObjectiveResult,
    fused_objective,
    objective_denominators,
)

MIN_BUCKET = 128
MAX_COMPILED_SHAPES = 64


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
    """Rows of one or several documents with their anchors.

    Absent anchors have no valid label and see no context. Anchors ascend along their row.
    """

    token_ids_BS: torch.Tensor
    positions_BS: torch.Tensor
    """int64, within the document that a slot belongs to."""
    features_BSF: torch.Tensor
    target_states_BSD: torch.Tensor
    anchors_BA: torch.Tensor
    """int64 slots."""
    context_start_BA: torch.Tensor
    """int64, the first slot of the anchor's document."""
    labels_BAG: torch.Tensor
    valid_BAG: torch.Tensor
    target_slots_U: torch.Tensor
    """int64 into [B*S], ascending: where the target's distributions are needed, each once."""
    target_of_row_N: torch.Tensor
    """int64 into U, for each of the B*A*G rows."""
    target_bounds_M2: torch.Tensor
    """int64 [B*A, 2], always on the CPU: the part of U that a block's rows lie in."""

    @property
    def block_size(self) -> int:
        return self.labels_BAG.shape[2]

    def to(self, device: torch.device | str) -> TrainingBatch:
        """The batch on a device; the host waits for nothing if its tensors are pinned."""
        moved = {
            f.name: getattr(self, f.name).to(device, non_blocking=True)
            for f in fields(self)
            if f.name != "target_bounds_M2"
        }
        return replace(self, **moved)


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
    pack: bool = False,
    num_documents: int = 1,
) -> TrainingBatch:
    """Draw each sample's anchors and pad to common shapes.

    Args:
        num_anchors: anchors per sample; the batch has that many places for each.
        pad_multiple: rows are padded to a multiple of this many slots.
        num_features, hidden_size, dtype: of the states; an empty list of samples gives a batch of
            one padding sequence with no label, so that every rank of a step runs the same passes.
        pack: put all samples into one row, one after another, instead of each into its own. States
            then stay on the samples' device, and the row's length is one of `bucket_length`.
        num_documents: a packed row has places for the anchors of at least so many samples.
    """
    per_row = max(num_documents, len(samples)) if pack else 1
    batch = 1 if pack else max(1, len(samples))
    sizes = [s.token_ids_S.shape[0] for s in samples]
    longest = sum(sizes) if pack else max(sizes, default=1)
    length = max(1, -(-longest // pad_multiple)) * pad_multiple
    length = bucket_length(length) if pack else length
    device = samples[0].features_SF.device if samples else torch.device("cpu")
    token_ids = torch.zeros(batch, length, dtype=torch.int64)
    positions = torch.arange(length).repeat(batch, 1)
    features = torch.zeros(batch, length, num_features, dtype=dtype, device=device)
    states = torch.zeros(batch, length, hidden_size, dtype=dtype, device=device)
    anchors = torch.zeros(batch, per_row * num_anchors, dtype=torch.int64)
    starts = torch.zeros_like(anchors)
    labels = torch.zeros(batch, per_row * num_anchors, block_size, dtype=torch.int64)
    valid = torch.zeros_like(labels, dtype=torch.bool)
    start = place = 0
    for index, (sample, size) in enumerate(zip(samples, sizes, strict=True)):
        row = 0 if pack else index
        if not pack:
            start = place = 0
        slots = slice(start, start + size)
        token_ids[row, slots] = sample.token_ids_S
        positions[row, slots] = torch.arange(size)
        features[row, slots] = sample.features_SF
        states[row, slots] = sample.target_states_SD
        drawn = draw_anchors(
            sample.loss_mask_S,
            num_anchors,
            seed=seed,
            epoch=sample.epoch,
            sample_id=sample.sample_id,
        )
        places = slice(place, place + drawn.shape[0])
        anchors[row, places] = drawn + start
        starts[row, places] = start
        labels[row, places], valid[row, places] = block_labels(
            sample.token_ids_S, sample.loss_mask_S, drawn, block_size
        )
        start += size
        place += drawn.shape[0]
    return TrainingBatch(
        token_ids,
        positions,
        features,
        states,
        anchors,
        starts,
        labels,
        valid,
        *unique_targets(anchors, valid, length),
    )


def bucket_length(length: int) -> int:
    """The next of 128, 192, 256, 384, 512, 768 ...: few lengths, so that little is compiled."""
    bucket = MIN_BUCKET
    while bucket < length:
        bucket = bucket * 3 // 2 if bucket & (bucket - 1) == 0 else bucket // 3 * 4
    return bucket


def unique_targets(
    anchors_BA: torch.Tensor, valid_BAG: torch.Tensor, num_slots: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`TrainingBatch.target_slots_U`, `target_of_row_N` and `target_bounds_M2`.

    Row g of a block predicts the token at p+1+g, whose distribution comes from the state at p+g.
    Blocks overlap, so that far fewer distributions than rows are needed. A row without a label
    points to where the rows before it do.
    """
    batch, _, block = valid_BAG.shape
    rows_B = torch.arange(batch) * num_slots
    slots_BAG = (rows_B.view(-1, 1, 1) + anchors_BA.unsqueeze(2)) + torch.arange(block)
    slots_U, of_valid = torch.unique(slots_BAG[valid_BAG], return_inverse=True)
    if not slots_U.numel():
        slots_U = torch.zeros(1, dtype=torch.int64)
    of_row_BAG = torch.zeros_like(slots_BAG)
    of_row_BAG[valid_BAG] = of_valid
    of_row_N = of_row_BAG.view(-1)
    at_N = torch.where(valid_BAG.view(-1), torch.arange(of_row_N.shape[0]), 0).cummax(0).values
    of_row_N = of_row_N[at_N]
    of_block = of_row_N.view(-1, block)
    bounds = torch.stack([of_block.amin(1), of_block.amax(1) + 1], dim=1)
    return slots_U, of_row_N, bounds


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
        visible: Visible
        if on_gpu:
            visible = block_mask(batch.context_start_BA, batch.anchors_BA, num_slots, block)
        else:
            visible = context_mask(batch.context_start_BA, batch.anchors_BA, num_slots)
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
    """`_draft_rows` for GPUs, compiled once for each shape that occurs."""
    # Beyond its limit of 8 shapes, dynamo would go on uncompiled without a word.
    torch._dynamo.config.recompile_limit = MAX_COMPILED_SHAPES
    return torch.compile(_draft_rows, dynamic=False)
