"""Samples laid out as a micro-batch: rows of tokens, anchors with their labels, target states.

Shapes: B row, S position, A anchor, G block position, D hidden, F context features.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F

from dspark.anchors import block_labels, draw_anchors
from dspark.objective_config import ObjectiveConfig, objective_denominators


@dataclass(frozen=True)
class TrainingSample:
    """One document."""

    sample_id: str
    epoch: int
    token_ids_S: torch.Tensor
    """int64."""
    loss_mask_S: torch.Tensor
    """bool."""


@dataclass(frozen=True)
class BatchLayout:
    """Rows of one or several documents with their anchors, all that follows from the tokens alone.

    Absent anchors have no valid label and see no context. Anchors ascend along their row.
    """

    token_ids_BS: torch.Tensor
    positions_BS: torch.Tensor
    """int64, within the document that a slot belongs to."""
    anchors_BA: torch.Tensor
    """int64 slots."""
    context_start_BA: torch.Tensor
    """int64, the first slot of the anchor's document."""
    labels_BAG: torch.Tensor
    valid_BAG: torch.Tensor
    target_slots_U: torch.Tensor
    """int64 into [B*S], ascending: where the target's distributions are needed, each once. In a row
    of fixed length there are as many as slots, zeros behind those that are needed."""
    target_of_row_N: torch.Tensor
    """int64 into U, for each of the B*A*G rows."""
    target_bounds_M2: torch.Tensor
    """int64 [B*A, 2], always on the CPU: the part of U that a block's rows lie in."""

    @property
    def block_size(self) -> int:
        """Labels of an anchor."""
        return self.labels_BAG.shape[2]

    def empty_states(
        self, num_features: int, hidden_size: int, dtype: torch.dtype, device: str = "cpu"
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Memory for the features [B, S, F] and target states [B, S, D] of such rows."""
        batch, length = self.token_ids_BS.shape
        features, target_states = (
            torch.empty(batch, length, width, dtype=dtype, device=device)
            for width in (num_features, hidden_size)
        )
        return features, target_states

    def with_states(
        self,
        states: Iterable[tuple[torch.Tensor, torch.Tensor]],
        into: tuple[torch.Tensor, torch.Tensor],
    ) -> TrainingBatch:
        """The whole micro-batch on the device of `into`, with copies of the target's states there.

        On a GPU the host waits for nothing: states in device memory are copied by the current
        stream, and what is laid out passes through pinned memory.

        Args:
            states: features [S, F] and target states [S, D] of each sample that was laid out, in
                their order; taken one at a time.
            into: as `empty_states` gives it; what is in it is overwritten.
        """
        features, target_states = into
        batch = features.shape[0]
        ends = [0] * batch
        for index, (features_SF, target_states_SD) in enumerate(states):
            row = index if batch > 1 else 0
            part = slice(ends[row], ends[row] + features_SF.shape[0])
            features[row, part].copy_(features_SF, non_blocking=True)
            target_states[row, part].copy_(target_states_SD, non_blocking=True)
            ends[row] = part.stop
        for row, end in enumerate(ends):
            # Padding is masked, but a NaN there would not stay there.
            features[row, end:] = 0
            target_states[row, end:] = 0
        moved = {
            f.name: _moved(getattr(self, f.name), features.device)
            for f in fields(self)
            if f.name != "target_bounds_M2"
        }
        return TrainingBatch(
            **moved,
            target_bounds_M2=self.target_bounds_M2,
            features_BSF=features,
            target_states_BSD=target_states,
        )


@dataclass(frozen=True)
class TrainingBatch(BatchLayout):
    """A layout with the target's states, ready for a forward pass."""

    features_BSF: torch.Tensor
    target_states_BSD: torch.Tensor


def _moved(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def lay_out(
    samples: Sequence[TrainingSample],
    *,
    num_anchors: int,
    block_size: int,
    seed: int,
    pad_multiple: int = 1,
    row_tokens: int = 0,
    max_documents: int = 1,
) -> BatchLayout:
    """Draw each sample's anchors and give everything its place, on the CPU.

    An empty list of samples gives one row of padding with no label, so that every rank of a step
    runs the same passes.

    Args:
        num_anchors: anchors per sample; there are that many places for each.
        pad_multiple: with a row for each sample, rows are padded to a multiple of so many slots.
        row_tokens: 0 gives each sample a row of its own. Above, all are put into one row of so many
            slots, one after another, and every shape is the same whatever they are.
        max_documents: samples whose anchors such a row has places for.

    Raises:
        ValueError: the samples are more, or longer together, than the row takes.
    """
    sizes = [s.token_ids_S.shape[0] for s in samples]
    if row_tokens:
        if sum(sizes) > row_tokens or len(samples) > max_documents:
            raise ValueError(
                f"lay_out: {len(samples)} samples of {sum(sizes)} tokens do not fit a row of "
                f"{max_documents} samples and {row_tokens} tokens; assign fewer to a row"
            )
        batch, length, places_per_row = 1, row_tokens, max_documents * num_anchors
    else:
        batch, places_per_row = max(1, len(samples)), num_anchors
        length = -(-max(sizes, default=1) // pad_multiple) * pad_multiple
    token_ids = torch.zeros(batch, length, dtype=torch.int64)
    positions = torch.arange(length).repeat(batch, 1)
    anchors = torch.zeros(batch, places_per_row, dtype=torch.int64)
    starts = torch.zeros_like(anchors)
    labels = torch.zeros(batch, places_per_row, block_size, dtype=torch.int64)
    valid = torch.zeros_like(labels, dtype=torch.bool)
    rows = [samples] if row_tokens and samples else [[sample] for sample in samples]
    for row, documents in enumerate(rows):
        lengths = torch.tensor([s.token_ids_S.shape[0] for s in documents])
        drawn = [
            draw_anchors(
                s.loss_mask_S, num_anchors, seed=seed, epoch=s.epoch, sample_id=s.sample_id
            )
            for s in documents
        ]
        counts = torch.tensor([len(places) for places in drawn])
        ends = lengths.cumsum(0)
        begins = ends - lengths
        tokens, mask = (
            torch.cat([getattr(s, name) for s in documents])
            for name in ("token_ids_S", "loss_mask_S")
        )
        num_tokens, num_places = tokens.shape[0], int(counts.sum())
        token_ids[row, :num_tokens] = tokens
        positions[row, :num_tokens] -= begins.repeat_interleave(lengths)
        starts[row, :num_places] = of_anchor = begins.repeat_interleave(counts)
        anchors[row, :num_places] = at = torch.cat(drawn) + of_anchor
        labels[row, :num_places], valid[row, :num_places] = block_labels(
            tokens, mask, at, block_size, ends.repeat_interleave(counts)
        )
    slots_U, of_row_N, bounds_M2 = unique_targets(anchors, valid, length)
    if row_tokens:
        slots_U = F.pad(slots_U, (0, row_tokens - slots_U.shape[0]))
    return BatchLayout(
        token_ids, positions, anchors, starts, labels, valid, slots_U, of_row_N, bounds_M2
    )


def unique_targets(
    anchors_BA: torch.Tensor, valid_BAG: torch.Tensor, num_slots: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`BatchLayout.target_slots_U`, `target_of_row_N` and `target_bounds_M2`.

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
    batch: BatchLayout, config: ObjectiveConfig
) -> tuple[torch.Tensor, torch.Tensor]:
    """What this micro-batch adds to the window's total weights: terms and confidence, float64."""
    return objective_denominators(config, batch.valid_BAG.flatten(0, 1))


def previous_tokens(batch: BatchLayout) -> torch.Tensor:
    """The data's token before each predicted one, int64 [B, A, G]: the anchor, then the labels."""
    anchor_tokens_BA = batch.token_ids_BS.gather(1, batch.anchors_BA)
    return torch.cat([anchor_tokens_BA.unsqueeze(2), batch.labels_BAG[:, :, :-1]], dim=2)
