"""One DeepSpeed rank: batches in, optimizer steps, snapshots and checkpoints out.

The rank decides nothing about data. It asks the coordinator for its share of every step, one step
ahead, and trains until it is told that there is none.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dspark.checkpoint import save_draft
from dspark.model import DSparkDraft
from dspark.target import FrozenTarget
from dspark.training import (
    DraftWithLoss,
    TrainingBatch,
    TrainingSample,
    batch_denominators,
    collate,
)
from dspark.warm_start import init_from_target
from splitserve.messages import (
    Batch,
    BatchItem,
    CheckpointSaved,
    Metrics,
    NeedBatch,
    NoBatch,
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
from splitserve.train.spec import TrainerSpec
from splitserve.transport.ring import RingReader
from splitserve.worker import Channel

PAD_MULTIPLE = 32
"""Sequences are padded to a multiple of this, so that few shapes occur."""


def run(channel: Channel, spec: TrainerSpec) -> None:
    """The trainer role: build, then train until the coordinator has no more batches."""
    torch.set_num_threads(spec.num_threads)
    rank = TrainerRank(channel, spec)
    rank.train()


def deepspeed_config(spec: TrainerSpec) -> dict[str, Any]:
    """DeepSpeed's own settings for a run.

    Gradients are accumulated and exchanged in float32, and DeepSpeed does no scaling of its own
    that the loss does not undo: sums are divided by the window's total weight.
    """
    train = spec.train
    share = -(-train.global_batch_size // spec.world_size)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": train.micro_batch_size,
        "gradient_accumulation_steps": -(-share // train.micro_batch_size),
        "gradient_clipping": train.clip_norm,
        "zero_optimization": {"stage": train.zero_stage},
        "communication_data_type": "fp32",
        "steps_per_print": 2**31,
    }
    if train.dtype == "bfloat16":
        config["bf16"] = {"enabled": True}
        config["data_types"] = {"grad_accum_dtype": "fp32"}
    return config


class TrainerRank:
    """Holds the draft and its optimizer for the life of the process."""

    def __init__(self, channel: Channel, spec: TrainerSpec) -> None:
        self._channel, self._spec = channel, spec
        self._dtype = getattr(torch, spec.train.dtype)
        self._init_distributed()
        channel.state = "loading the target's embedding and lm_head"
        target = FrozenTarget.load(spec.target_path, dtype=self._dtype, device=spec.device)
        torch.manual_seed(spec.seed)  # the same initial draft on every rank
        draft = DSparkDraft(spec.draft)
        if spec.warm_start:
            init_from_target(draft, spec.target_path)
        self._draft = draft
        model = DraftWithLoss(draft, target.embedding, target.lm_head, spec.objective)
        self._engine, self._optimizer = self._init_deepspeed(model)
        self._ring = RingReader.attach(spec.ring_path, spec.ring_layout)
        self._meta = {"zero_stage": spec.train.zero_stage, "draft": spec.draft.to_hf()}
        self._step = 0
        if spec.resume_from:
            channel.state = f"reading {spec.resume_from}"
            self._step = load_checkpoint(self._engine, Path(spec.resume_from), self._meta)
        self._metrics = MetricWindow(spec.draft.block_size, spec.world_size)

    def _init_distributed(self) -> None:
        spec = self._spec
        self._channel.state = "waiting for the other trainer ranks"
        os.environ.update(
            DS_ACCELERATOR="cpu" if spec.device == "cpu" else "cuda",
            RANK=str(spec.rank),
            LOCAL_RANK=str(spec.rank),
            WORLD_SIZE=str(spec.world_size),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(spec.master_port),
        )
        import deepspeed

        # DeepSpeed would compile a shared-memory all-reduce at start-up, which takes half a
        # minute and a compiler; gloo serves the few megabytes that are exchanged here.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        dist.init_process_group(
            "gloo" if spec.device == "cpu" else "nccl",
            init_method=f"tcp://127.0.0.1:{spec.master_port}",
            rank=spec.rank,
            world_size=spec.world_size,
            timeout=timedelta(seconds=spec.collective_timeout_seconds),
        )
        deepspeed.init_distributed(dist_init_required=False, verbose=False)

    def _init_deepspeed(self, model: torch.nn.Module) -> tuple[Any, torch.optim.Optimizer]:
        import deepspeed

        train = self._spec.train
        optimizer = torch.optim.AdamW(
            model.parameters(),
            lr=train.learning_rate,
            betas=tuple(train.betas),
            eps=train.eps,
            weight_decay=train.weight_decay,
        )
        self._channel.state = "initialising DeepSpeed"
        engine, *_ = deepspeed.initialize(
            model=model, optimizer=optimizer, config=deepspeed_config(self._spec)
        )
        return engine, optimizer

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
        size = train.micro_batch_size
        micro_batches = [
            self._collate(batch.items[first : first + size])
            for first in range(0, batch.num_micro_batches * size, size)
        ]
        weights = torch.zeros(2, dtype=torch.float64)
        for micro_batch in micro_batches:
            terms, confidence = batch_denominators(micro_batch, spec.objective)
            weights += torch.tensor([terms, confidence], dtype=torch.float64)
        dist.all_reduce(weights)
        # DeepSpeed averages gradients over ranks; a window without any label moves nothing.
        scales = [spec.world_size / w if w > 0 else 0.0 for w in weights.tolist()]
        rate = learning_rate(batch.step, train)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        for micro_batch in micro_batches:
            result = self._engine(micro_batch, scales[0], scales[1])
            self._metrics.add(result.metrics, result.loss)
            self._engine.backward(result.loss, scale_wrt_gas=False)
            self._engine.step()
        self._metrics.end_step(rate, self._engine.get_global_grad_norm())
        self._metrics.require_finite(batch.step, spec.checkpoints)

    def _collate(self, items: Sequence[BatchItem]) -> TrainingBatch:
        draft = self._spec.draft
        return collate(
            [self._sample(item) for item in items],
            num_anchors=self._spec.train.num_anchors,
            block_size=draft.block_size,
            seed=self._spec.seed,
            pad_multiple=PAD_MULTIPLE,
            num_features=draft.num_context_features,
            hidden_size=draft.hidden_size,
            dtype=self._dtype,
        )

    def _sample(self, item: BatchItem) -> TrainingSample:
        states = self._ring.read(item.slot)
        token_ids = torch.tensor(item.token_ids)
        loss_mask = torch.arange(len(token_ids)) >= item.num_prompt_tokens
        return TrainingSample(
            item.sample_id, item.epoch, token_ids, loss_mask, states.features, states.target_states
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
