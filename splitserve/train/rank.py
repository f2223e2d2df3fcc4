"""One DeepSpeed rank: batches in, optimizer steps, snapshots and checkpoints out.

The rank decides nothing about data. It asks the coordinator for its share of every step, one step
ahead, and trains until it is told that there is none. On a GPU the host prepares the next batch and
reads the last step's numbers while the device works.
"""

from __future__ import annotations

import time
from collections import deque
from pathlib import Path

import torch
import torch.distributed as dist

from dspark.checkpoint import save_draft
from dspark.initial import initial_draft
from dspark.target import FrozenTarget
from dspark.training import DraftWithLoss
from splitserve.messages import (
    Batch,
    CheckpointSaved,
    Metrics,
    NeedBatch,
    NoBatch,
    SlotsFree,
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
from splitserve.train.optimizer import apply_settings, init_process_group, initialise_engine
from splitserve.train.prefetch import Prefetcher, StepPlan
from splitserve.train.snapshots import SnapshotWriter
from splitserve.train.spec import TrainerSpec
from splitserve.transport.rings import RingReaders
from splitserve.transport.weights import DraftExchange
from splitserve.worker import Channel


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
        channel.state = "waiting for the other trainer ranks"
        init_process_group(
            spec.device,
            rank=spec.rank,
            world_size=spec.world_size,
            master_port=spec.master_port,
            timeout_seconds=spec.collective_timeout_seconds,
        )
        channel.state = "loading the target's embedding and lm_head"
        target = FrozenTarget.load(
            spec.target_path, dtype=getattr(torch, spec.train.dtype), device=spec.device
        )
        draft = initial_draft(spec.draft, spec.seed, spec.target_path if spec.warm_start else "")
        self._draft = draft
        model = DraftWithLoss(draft, target.embedding, target.lm_head, spec.objective)
        channel.state = "initialising DeepSpeed"
        self._engine, self._optimizer = initialise_engine(model, spec.train, spec.world_size)
        self._prefetch = Prefetcher(spec, RingReaders.attach(spec.rings, spec.device))
        self._planned: deque[StepPlan] = deque()
        """Steps whose batch has come and which have not begun."""
        self._no_more = self._finished = False
        self._snapshot_at = -1
        self._waited = 0.0
        self._flops, self._reported = 0.0, time.monotonic()
        """Done since the last report, and when that was."""
        exchange = None
        if spec.exchange is not None and spec.rank == 0:
            exchange = DraftExchange.attach(spec.exchange)
        self._snapshots = SnapshotWriter(channel.send, spec.draft, spec.device, exchange)
        self._meta = {"zero_stage": spec.train.zero_stage, "draft": spec.draft.to_hf()}
        self._step = 0
        if spec.resume_from:
            channel.state = f"reading {spec.resume_from}"
            self._step = load_checkpoint(self._engine, Path(spec.resume_from), self._meta)
            apply_settings(self._engine, spec.train)
        self._metrics = MetricWindow(spec.world_size)

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
        while (plan := self._next_step()) is not None:
            started = time.monotonic()
            if not plan.last:
                self._ask(plan.step + 1)
            self._channel.state = f"step {plan.step}"
            self._optimizer_step(plan)
            self._flops += plan.flops
            self._step = plan.step + 1
            seconds = time.monotonic() - started
            self._channel.send(StepDone(spec.rank, plan.step, self._waited, seconds))
            if self._step % spec.train.log_every == 0:
                self._report()
            if spec.eval_every and self._step % spec.eval_every == 0:
                self._snapshot()
            if self._step % spec.train.save_every == 0:
                self._save()
                saved_at = self._step
            if plan.last:
                self._finished = True
                break
        if self._finished and self._snapshot_at != self._step:
            self._snapshot()
        if self._step > 0 and saved_at != self._step:
            self._save()
        self._finish_snapshot()
        self._channel.send(TrainerDone(spec.rank, self._step))

    def _ask(self, step: int) -> None:
        self._channel.send(NeedBatch(self._spec.rank, step))

    def _next_step(self) -> StepPlan | None:
        """The plan of the next step, None when there is no more; waits for its batch."""
        started = time.monotonic()
        self._channel.state = f"waiting for the batch of step {self._step}"
        while not self._planned and not self._no_more:
            self._receive(timeout_seconds=1.0)
            self._let_go()
        self._waited = time.monotonic() - started
        if not self._planned:
            return None
        plan = self._planned.popleft()
        assert plan.step == self._step, f"{plan.step} came for step {self._step}"
        return plan

    def _receive(self, timeout_seconds: float) -> None:
        message = self._channel.receive(timeout_seconds)
        if isinstance(message, Batch):
            self._planned.append(self._prefetch.add(message))
        elif isinstance(message, NoBatch | Stop):
            self._no_more = True
            self._finished |= isinstance(message, NoBatch) and message.finished

    def _look_ahead(self) -> None:
        """Prepare what comes next; the device has work, and nothing here waits for it."""
        self._receive(timeout_seconds=0.0)
        self._prefetch.copy_ahead()
        self._let_go()

    def _let_go(self) -> None:
        for step in self._prefetch.let_go():
            self._channel.send(SlotsFree(self._spec.rank, step))

    def _optimizer_step(self, plan: StepPlan) -> None:
        """One optimizer window: every micro-batch of this rank, then one update."""
        spec = self._spec
        # On the host and over gloo: the device need not stop for numbers that the host has.
        dist.all_reduce(plan.weights)
        # DeepSpeed averages gradients over ranks; a window without any label moves nothing.
        scales = [spec.world_size / w if w > 0 else 0.0 for w in plan.weights.tolist()]
        rate = learning_rate(plan.step, spec.train)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        for number in range(1, plan.num_micro_batches + 1):
            self._engine.set_gradient_accumulation_boundary(number == plan.num_micro_batches)
            result = self._engine(self._prefetch.take(), scales[0], scales[1])
            self._metrics.add(result.metrics, result.loss)
            self._engine.backward(result.loss, scale_wrt_gas=False)
            # Before the update, in which DeepSpeed's own optimizers wait for the gradient's norm.
            self._look_ahead()
            self._engine.step()
        self._metrics.end_step(plan.step, rate, self._engine.get_global_grad_norm())
        self._metrics.require_finite(spec.checkpoints, unread=1)
        self._snapshots.check()
        self._let_go()

    # --- what goes out ---------------------------------------------------------------------------

    def _report(self) -> None:
        self._metrics.require_finite(self._spec.checkpoints)
        values = self._metrics.reduce()
        # What was reduced has been computed by now.
        now = time.monotonic()
        values["rank_0_tflop_per_s"] = self._flops / (now - self._reported) / 1e12
        self._flops, self._reported = 0.0, now
        if self._spec.device != "cpu":
            values["trainer_peak_memory_gb"] = torch.cuda.max_memory_allocated() / 1e9
        if self._spec.rank == 0:
            self._channel.send(Metrics(self._step, values))

    def _snapshot(self) -> None:
        """Hand the draft as it is to the evaluator; training need not wait until it has it."""
        self._snapshot_at = self._step
        self._metrics.require_finite(self._spec.checkpoints)
        self._channel.state = f"collecting the draft of step {self._step}"
        state = gather_draft_state(self._draft, keep=self._spec.rank == 0)
        if self._spec.rank == 0:
            folder = Path(self._spec.snapshots) / checkpoint_name(self._step)
            self._snapshots.begin(self._step, folder, state)

    def _finish_snapshot(self) -> None:
        self._channel.state = f"waiting until the last snapshot is in {self._spec.snapshots}"
        self._snapshots.join()

    def _save(self) -> None:
        self._metrics.require_finite(self._spec.checkpoints)
        # Whoever resumes from here does not make the snapshots of the steps before again.
        self._finish_snapshot()
        self._channel.state = f"saving the checkpoint of step {self._step}"
        state = gather_draft_state(self._draft, keep=self._spec.rank == 0)
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
