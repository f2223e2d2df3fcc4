"""The one process that knows the whole run: it moves messages, watches, counts and ends.

Nothing here touches a hidden state or a weight. The loop waits for messages with a bound, hands
the engine as much work as it may hold, serves batches when they are complete, and looks after the
processes: a worker that dies or falls silent is restarted where that costs nothing (engine,
evaluator) and ends the run with a checkpoint to resume from where it does not (trainers).
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path
from types import FrameType
from typing import Any

from splitserve.errors import RunFailed
from splitserve.messages import (
    EVALUATION,
    CheckpointSaved,
    DraftUpdated,
    EngineReady,
    Evaluated,
    EvaluatorReady,
    Fatal,
    Generated,
    Metrics,
    NeedBatch,
    NoBatch,
    Rejected,
    SlotsFree,
    SnapshotReady,
    StepDone,
    Taught,
    TrainerDone,
    TrainerReady,
    UpdateDraft,
)
from splitserve.run.display import Display
from splitserve.run.engines import Engines
from splitserve.run.evaluations import Evaluations, accept_length_of
from splitserve.run.feeder import Feeder
from splitserve.run.folder import RunFolder
from splitserve.run.process import ChildProcess, stop_all
from splitserve.run.progress import Progress
from splitserve.trackers import Tracker

POLL_SECONDS = 0.1
STOP_SECONDS = 7.0
"""Time for the trainers to finish their step and save after Ctrl-C."""
CLEANUP_SECONDS = 2.0


@dataclass(frozen=True)
class CoordinatorOptions:
    """What the loop itself needs to know."""

    num_steps: int
    max_drop_fraction: float
    max_restarts: int
    heartbeat_timeout_seconds: float
    machine: Callable[[], dict[str, float]] = dict
    """Figures of the machine for the log, such as the memory in use."""
    early_stop: int = 0
    """Measurements without a better one after which training ends; 0 never."""


@dataclass
class Outcome:
    """How a run ended."""

    finished: bool
    """False: stopped on request, with a checkpoint."""
    step: int
    final_report: dict[str, Any] | None = None
    checkpoint: str = ""
    seconds: dict[str, float] = field(default_factory=dict)


class Coordinator:
    """Runs the workers until every step is trained and every draft measured, or until stopped.

    Args:
        engines: the target engines, not yet started.
        start_evaluator, start_trainers: make the processes; called again where a process is
            restarted. Without `start_evaluator` the first engine measures the drafts.
    """

    def __init__(
        self,
        folder: RunFolder,
        feeder: Feeder,
        evaluations: Evaluations,
        options: CoordinatorOptions,
        display: Display,
        tracker: Tracker,
        engines: Engines,
        start_evaluator: Callable[[], ChildProcess] | None,
        start_trainers: Callable[[], list[ChildProcess]],
    ) -> None:
        self._folder, self._feeder, self._evaluations = folder, feeder, evaluations
        self._options, self._display, self._tracker = options, display, tracker
        self._engines, self._start_evaluator = engines, start_evaluator
        self._start_trainers = start_trainers
        self._num_steps = options.num_steps
        self._progress = Progress(num_steps=options.num_steps)
        self._evaluator: ChildProcess | None = None
        self._evaluator_ready = False
        self._trainers: list[ChildProcess] = []
        self._restarts = {"engine": 0, "evaluator": 0}
        self._asked: set[tuple[int, int]] = set()
        self._last_served = -1
        self._done: dict[int, int] = {}
        self._stop_at: float | None = None
        self._signals = 0
        self._final_asked = False
        self._outcome: Outcome | None = None
        self._failure = ""
        """Why the run has to end, while the trainers still save."""

    # --- life ------------------------------------------------------------------------------------

    def run(self) -> Outcome:
        """The whole run. Whatever happens, no process is left when this returns or raises."""
        previous = {s: signal.signal(s, self._on_signal) for s in (signal.SIGINT, signal.SIGTERM)}
        try:
            if self._start_evaluator is not None:
                self._evaluator = self._start_evaluator()
            self._engines.start()
            self._trainers = self._start_trainers()
            while self._outcome is None:
                self._turn()
            return self._outcome
        finally:
            stop_all(self._children(), CLEANUP_SECONDS)
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._signals += 1
        if self._signals > 1:
            # Asked twice: give up the checkpoint, keep the promise that nothing is left behind.
            raise KeyboardInterrupt

    def _children(self) -> list[ChildProcess]:
        evaluators = [] if self._evaluator is None else [self._evaluator]
        return [*self._engines.children, *evaluators, *self._trainers]

    def _turn(self) -> None:
        """One turn of the loop."""
        children = self._children()
        wait([c.connection for c in children if not c.closed], timeout=POLL_SECONDS)
        for child in children:
            for message in child.receive():
                self._handle(child, message)
        self._progress.tick(
            busy_share=self._busy_share(),
            engine_up=self._engines.ready,
        )
        counters = self._feeder.counters
        self._progress.count(
            answers=counters.generated, tokens=counters.generated_tokens + counters.taught_tokens
        )
        if self._signals and self._stop_at is None:
            self._begin_to_stop()
            self._display.note("stopping: the trainers finish their step and save (again: at once)")
        self._watch()
        self._serve()
        self._feed()
        self._evaluate()
        self._display.show(self._progress, self._feeder, self._evaluations.best)
        self._end_if_done()

    def _busy_share(self) -> float:
        """Share of the engines that have something to do."""
        busy = self._engines.num_busy
        if self._start_evaluator is None and not self._evaluations.idle:
            busy = max(busy, 1)
        return busy / self._engines.count

    def _begin_to_stop(self) -> None:
        """From here on trainers get no batch: they save and end."""
        self._stop_at = time.monotonic() + STOP_SECONDS

    # --- messages --------------------------------------------------------------------------------

    def _handle(self, child: ChildProcess, message: Any) -> None:
        if isinstance(message, Fatal):
            child.fatal = message.message
        elif isinstance(message, Generated):
            self._engines.answered(child, message)
            entry = self._feeder.entries[message.request_id]
            self._folder.write_response(
                entry.sample_id,
                entry.prompt_ids,
                message.output_ids,
                message.finish_reason,
                entry.sampling,
                message.draft_step,
            )
            self._feeder.generated(message)
            self._check_drops()
        elif isinstance(message, Taught):
            self._engines.answered(child, message)
            self._feeder.taught(message)
        elif isinstance(message, Rejected) and message.request_id == EVALUATION:
            self._fail(child, message.reason)
        elif isinstance(message, Rejected):
            self._engines.answered(child, message)
            self._feeder.rejected(message)
            self._check_drops()
        elif isinstance(message, NeedBatch):
            self._asked.add((message.rank, message.step))
        elif isinstance(message, SlotsFree):
            self._feeder.step_done(message.rank, message.step)
        elif isinstance(message, StepDone):
            self._progress.step_done(message)
        elif isinstance(message, Metrics):
            self._log("train", message.step, {**message.values, **self._rates()})
            self._progress.metrics = message.values
            self._display.metrics(message.step, message.values, self._progress)
        elif isinstance(message, SnapshotReady):
            self._evaluations.add(message)
        elif isinstance(message, Evaluated):
            self._evaluated(message)
        elif isinstance(message, EngineReady):
            self._engines.is_up(child)
            self._log("engine_ready", self._progress.step, dict(message.info))
            self._display.note(f"target {child.name} ready: {_short(message.info)}")
        elif isinstance(message, DraftUpdated):
            self._log("draft_update", message.step, {"seconds": message.seconds})
        elif isinstance(message, EvaluatorReady):
            self._evaluator_ready = True
        elif isinstance(message, TrainerReady):
            self._progress.trainer_ready(message)
        elif isinstance(message, CheckpointSaved):
            self._progress.checkpoint = message.path
            self._log("checkpoint", message.step, {"path": message.path})
        elif isinstance(message, TrainerDone):
            child.finished = True
            self._done[message.rank] = message.next_step
        else:
            raise AssertionError(f"{child.name} sent {message!r}")

    def _rates(self) -> dict[str, float]:
        """Who waits for whom, and what flows, lately."""
        counters, ring = self._feeder.counters, self._feeder.ring
        return {
            **self._progress.rates(self._feeder.schedule.global_batch_size),
            "ring_fill": ring.used_bytes / ring.capacity_bytes,
            **counters.take_draft_age(),
            **self._options.machine(),
        }

    def _evaluated(self, message: Evaluated) -> None:
        self._folder.write_eval(message.step, message.report)
        if self._final_asked:
            self._outcome = Outcome(
                True,
                self._num_steps,
                message.report,
                self._progress.checkpoint,
                self._progress.seconds(),
            )
            return
        is_best = self._evaluations.finished(message.step, message.report)
        accept_length = accept_length_of(message.report)
        self._progress.accept_length = accept_length
        timings = message.report["reports"][0].get("timings", {})
        self._log(
            "eval", message.step, {"accept_length": accept_length, "best": is_best, **timings}
        )
        self._display.evaluated(message.step, message.report, is_best)
        patience = self._options.early_stop
        if patience and self._evaluations.num_since_best >= patience:
            self._stop_early(patience)

    def _stop_early(self, patience: int) -> None:
        """Let the trainers finish what they have, as if the run had been planned so."""
        end = max(self._last_served + 1, self._progress.first_step)
        if end < self._num_steps:
            self._num_steps = self._progress.num_steps = end
            self._display.note(
                f"eval.early_stop: {patience} measurements without a better accept length; "
                f"training ends after {end} steps"
            )

    def _log(self, kind: str, step: int, values: dict[str, Any]) -> None:
        self._folder.write_metrics(kind, step, values)
        numbers = {f"{kind}/{k}": v for k, v in values.items() if isinstance(v, int | float)}
        if numbers:
            self._tracker.log(step, numbers)

    def _check_drops(self) -> None:
        """Stop early when too much is being lost: a draft trained on the rest would mislead."""
        dropped = sum(self._feeder.counters.dropped.values())
        total = self._feeder.num_samples
        if dropped == total or dropped > self._options.max_drop_fraction * total:
            reasons = ", ".join(f"{n} x {r}" for r, n in self._feeder.counters.dropped.items())
            raise RunFailed(
                f"data.max_drop_fraction: {dropped} of {total} samples were dropped ({reasons}), "
                f"more than the {self._options.max_drop_fraction:.0%} allowed. Look at "
                f"{self._folder.responses}; a target that answers nothing usable often has the "
                "wrong chat template, too small a data.max_tokens or max_new_tokens"
            )

    # --- work ------------------------------------------------------------------------------------

    def _serve(self) -> None:
        """Answer the ranks that wait for a batch."""
        for rank, step in sorted(self._asked):
            stopping = self._stop_at is not None and step > self._last_served
            if step >= self._num_steps or stopping:
                self._trainers[rank].send(NoBatch(step, finished=step >= self._num_steps))
            else:
                batch = self._feeder.batch(rank, step)
                if batch is None:
                    continue
                self._last_served = max(self._last_served, step)
                self._trainers[rank].send(batch)
            self._asked.discard((rank, step))

    def _feed(self) -> None:
        """Keep the engine filled, and let it go once nothing more can be wanted from it."""
        if not self._engines.ready or self._stop_at is not None:
            return
        for request in self._feeder.requests():
            self._engines.send(request)
        if self._start_evaluator is None:
            # It measures to the end of the run.
            return
        if not self._feeder.in_flight and not self._feeder.engine_is_needed():
            self._engines.release()
            self._display.note("every sample is in the ring: the target is released")

    def _evaluate(self) -> None:
        if self._start_evaluator is None:
            evaluator = self._engines.first
        else:
            evaluator = self._evaluator if self._evaluator_ready else None
        if evaluator is None or self._stop_at is not None:
            return
        request = self._evaluations.next_request()
        trained = len(self._done) == len(self._trainers)
        if request is None and trained and self._evaluations.idle and not self._final_asked:
            request = self._evaluations.final_request()
            self._final_asked = True
        if request is not None:
            evaluator.send(request)
            if self._start_evaluator is None:
                for child in self._engines.others:
                    child.send(UpdateDraft(request.step, request.draft_path))

    def _end_if_done(self) -> None:
        if self._stop_at is None or self._outcome is not None:
            return
        saved = len(self._done) == len(self._trainers)
        if not saved and time.monotonic() < self._stop_at:
            return
        last = self._folder.last_checkpoint()
        if self._failure:
            raise RunFailed(self._failure + self._remedy())
        self._outcome = Outcome(
            False,
            max(self._done.values(), default=0),
            checkpoint=str(last or ""),
            seconds=self._progress.seconds(),
        )

    # --- supervision -----------------------------------------------------------------------------

    def _watch(self) -> None:
        for child in self._children():
            problem = self._problem_of(child)
            if problem is None:
                continue
            if child.finished:
                self._retire(child)
            elif child.role == "trainer" or child.fatal:
                self._fail(child, problem)
            else:
                self._restart(child, problem)

    def _problem_of(self, child: ChildProcess) -> str | None:
        code = child.exit_code()
        if child.fatal is not None:
            return child.fatal
        if code is not None:
            name = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
            return f"{child.name} (pid {child.pid}) ended with {name}"
        limit = self._options.heartbeat_timeout_seconds
        if child.silent_seconds() > limit:
            return (
                f"{child.name} (pid {child.pid}) has been silent for {limit:.0f} s; "
                f"its last word was: {child.state}"
            )
        return None

    def _retire(self, child: ChildProcess) -> None:
        """A worker that was done has gone, by itself or because it did not go in time."""
        child.close()
        self._engines.retire(child)

    def _restart(self, child: ChildProcess, problem: str) -> None:
        """Start the engine or the evaluator again; what it held is asked for again."""
        child.close()
        self._restarts[child.role] += 1
        if self._restarts[child.role] > self._options.max_restarts:
            self._fail(child, f"{problem}, after {self._options.max_restarts} restarts")
            return
        self._log("restart", self._progress.step, {"role": child.role, "problem": problem})
        self._display.note(f"{problem}; starting it again")
        if child.role == "engine":
            if self._start_evaluator is None and self._engines.number_of(child) == 0:
                self._evaluation_lost()
            self._feeder.engine_lost(self._engines.restart(child))
        else:
            assert self._start_evaluator is not None, "there is no evaluator to start again"
            self._evaluator_ready = False
            self._evaluation_lost()
            self._evaluator = self._start_evaluator()

    def _evaluation_lost(self) -> None:
        self._evaluations.evaluator_lost()
        self._final_asked = False

    def _fail(self, child: ChildProcess, problem: str) -> None:
        """End the run over a worker that cannot be replaced.

        The trainers, if they are not what failed, get the time to save what they have.
        """
        tail = "" if child.fatal else child.log_tail()
        reason = problem + "\n" + (f"{tail}\n" if tail else "") + f"log: {child.log_path}\n"
        if child.role == "trainer":
            raise RunFailed(reason + self._remedy())
        child.close()
        child.finished = True
        if not self._failure:
            self._failure = reason
            self._display.note(f"{problem}: the trainers save before the run ends")
            self._begin_to_stop()

    def _remedy(self) -> str:
        last = self._folder.last_checkpoint()
        if last is None:
            return f"no checkpoint was written yet; answers so far are kept in {self._folder.path}"
        return f"go on from {last} with resume=true run_dir={self._folder.path}"


def _short(info: dict[str, object]) -> str:
    return ", ".join(f"{k} {v}" for k, v in info.items() if isinstance(v, int | float | str))


def log_path(folder: RunFolder, name: str) -> Path:
    """Where a worker's output goes."""
    return folder.logs / f"{name}.log"
