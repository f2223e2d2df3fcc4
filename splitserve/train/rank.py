"""One DeepSpeed rank: batches in, optimizer steps, snapshots and checkpoints out.

The rank decides nothing about data. It asks the coordinator for its share of every step, one step
ahead, and trains until it is told that there is none.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from dspark.batch import BatchLayout, TrainingSample, batch_denominators, lay_out
from dspark.checkpoint import save_draft
from dspark.initial import initial_draft
from dspark.target import FrozenTarget
from dspark.training import DraftWithLoss
from splitserve.messages import (
    Batch,
    BatchItem,
    CheckpointSaved,
    Metrics,
    NeedBatch,
    NoBatch,
    SlotsFree,
    SnapshotReady,
    StepDone,
    Stop,
    TrainerDone,
    TrainerReady,
)
from splitserve.train.checkpoint import (
    checkpoint_name,
    gather_draft_state,
    load_checkpoint,
    save_checkpoint,
)
from splitserve.train.lr import learning_rate
from splitserve.train.metrics import MetricWindow
from splitserve.train.optimizer import init_process_group, initialise_engine
from splitserve.train.spec import TrainerSpec
from splitserve.transport.ring import RingReader
from splitserve.worker import Channel

PAD_MULTIPLE = 32
"""Sequences are padded to a multiple of this, so that few shapes occur."""


def run(channel: Channel, spec: TrainerSpec) -> None:
    """The trainer role: build, then train until the coordinator has no more batches."""
    torch.set_num_threads(spec.num_threads)
    # The tails of a distribution over a vocabulary are denormal numbers, on which a CPU is an order
    # of magnitude slower; as zeros they change nothing that float32 keeps.
    torch.set_flush_denormal(True)
    rank = TrainerRank(channel, spec)
    rank.train()


class TrainerRank:
    """Holds the draft and its optimizer for the life of the process."""

    def __init__(self, channel: Channel, spec: TrainerSpec) -> None:
        self._channel, self._spec = channel, spec
        self._dtype = getattr(torch, spec.train.dtype)
        channel.state = "waiting for the other trainer ranks"
        init_process_group(
            spec.device,
            rank=spec.rank,
            world_size=spec.world_size,
            master_port=spec.master_port,
            timeout_seconds=spec.collective_timeout_seconds,
        )
        channel.state = "loading the target's embedding and lm_head"
        target = FrozenTarget.load(spec.target_path, dtype=self._dtype, device=spec.device)
        draft = initial_draft(spec.draft, spec.seed, spec.target_path if spec.warm_start else "")
        self._draft = draft
        model = DraftWithLoss(draft, target.embedding, target.lm_head, spec.objective)
        channel.state = "initialising DeepSpeed"
        self._engine, self._optimizer = initialise_engine(model, spec.train, spec.world_size)
        self._ring = RingReader.attach(spec.ring)
        self._meta = {"zero_stage": spec.train.zero_stage, "draft": spec.draft.to_hf()}
        self._step = 0
        if spec.resume_from:
            channel.state = f"reading {spec.resume_from}"
            self._step = load_checkpoint(self._engine, Path(spec.resume_from), self._meta)
        self._metrics = MetricWindow(spec.draft.block_size, spec.world_size)

    # --- the loop --------------------------------------------------------------------------------

    def train(self) -> None:
        """Train until there is no batch, then leave a checkpoint of the last finished step."""
        spec = self._spec
        num_parameters = sum(p.numel() for p in self._draft.parameters())
        self._channel.send(TrainerReady(spec.rank, self._step, num_parameters))
        if self._step == 0:
            self._snapshot()
        saved_at = self._step if spec.resume_from else -1
        self._ask(self._step)
        while (batch := self._receive_batch()) is not None:
            self._ask(batch.step + 1)
            started = time.monotonic()
            self._channel.state = f"step {batch.step}"
            self._optimizer_step(batch)
            self._step = batch.step + 1
            seconds = time.monotonic() - started
            self._channel.send(SlotsFree(spec.rank, batch.step))
            self._channel.send(StepDone(spec.rank, batch.step, self._waited, seconds))
            if self._step % spec.train.log_every == 0:
                self._report()
            if spec.eval_every and self._step % spec.eval_every == 0:
                self._snapshot()
            if self._step % spec.train.save_every == 0:
                self._save()
                saved_at = self._step
        if self._step == spec.train.steps and self._step % (
            spec.eval_every or spec.train.steps + 1
        ):
            self._snapshot()
        if self._step > 0 and saved_at != self._step:
            self._save()
        self._channel.send(TrainerDone(spec.rank, self._step))

    def _ask(self, step: int) -> None:
        self._channel.send(NeedBatch(self._spec.rank, step))

    def _receive_batch(self) -> Batch | None:
        started = time.monotonic()
        self._channel.state = f"waiting for the batch of step {self._step}"
        while True:
            message = self._channel.receive(timeout_seconds=1.0)
            if isinstance(message, Batch):
                self._waited = time.monotonic() - started
                assert message.step == self._step, f"{message.step} came for step {self._step}"
                return message
            if isinstance(message, NoBatch | Stop):
                return None

    def _optimizer_step(self, batch: Batch) -> None:
        """One optimizer window: every micro-batch of this rank, then one update."""
        spec, train = self._spec, self._spec.train
        micro_batches = []
        weights = torch.zeros(2, dtype=torch.float64)
        for items in batch.micro_batches:
            samples = [self._sample(item) for item in items]
            layout = self._lay_out(samples)
            terms, confidence = batch_denominators(layout, spec.objective)
            weights += torch.stack([terms, confidence])
            micro_batches.append(
                layout.with_states(
                    samples,
                    num_features=spec.draft.num_context_features,
                    hidden_size=spec.draft.hidden_size,
                    dtype=self._dtype,
                    device=spec.device,
                )
            )
        dist.all_reduce(weights)
        # DeepSpeed averages gradients over ranks; a window without any label moves nothing.
        scales = [spec.world_size / w if w > 0 else 0.0 for w in weights.tolist()]
        rate = learning_rate(batch.step, train)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        for number, micro_batch in enumerate(micro_batches, 1):
            self._engine.set_gradient_accumulation_boundary(number == len(micro_batches))
            result = self._engine(micro_batch, scales[0], scales[1])
            self._metrics.add(result.metrics, result.loss)
            self._engine.backward(result.loss, scale_wrt_gas=False)
            self._engine.step()
        self._metrics.end_step(rate, self._engine.get_global_grad_norm())
        self._metrics.require_finite(batch.step, spec.checkpoints)

    def _lay_out(self, samples: Sequence[TrainingSample]) -> BatchLayout:
        train = self._spec.train
        return lay_out(
            samples,
            num_anchors=train.num_anchors,
            block_size=self._spec.draft.block_size,
            seed=self._spec.seed,
            pad_multiple=PAD_MULTIPLE,
            row_tokens=self._spec.row_tokens,
            max_documents=train.micro_batch_size,
        )

    def _sample(self, item: BatchItem) -> TrainingSample:
        states = self._ring.read(item.slot)
        loss_mask = torch.zeros(len(item.token_ids), dtype=torch.bool)
        for begin, end in item.supervised:
            loss_mask[begin:end] = True
        return TrainingSample(
            item.sample_id,
            item.epoch,
            torch.tensor(item.token_ids),
            loss_mask,
            states.features,
            states.target_states,
        )

    # --- what goes out ---------------------------------------------------------------------------

    def _report(self) -> None:
        values = self._metrics.reduce()
        if self._spec.rank == 0:
            self._channel.send(Metrics(self._step, values))

    def _snapshot(self) -> None:
        self._channel.state = f"handing the draft of step {self._step} to the evaluator"
        state = gather_draft_state(self._draft)
        if self._spec.rank == 0:
            folder = Path(self._spec.snapshots) / checkpoint_name(self._step)
            save_draft(folder, self._spec.draft, state)
            self._channel.send(SnapshotReady(self._step, str(folder)))

    def _save(self) -> None:
        self._channel.state = f"saving the checkpoint of step {self._step}"
        state = gather_draft_state(self._draft)
        folder = save_checkpoint(
            self._engine,
            Path(self._spec.checkpoints),
            self._step,
            self._meta,
            write_draft=lambda path: save_draft(path, self._spec.draft, state),
            keep=self._spec.train.keep_checkpoints,
        )
        if self._spec.rank == 0:
            self._channel.send(CheckpointSaved(self._step, str(folder)))
