"""Counters inside SGLang's scheduler: what was really done in each step, not what was asked for.

Active only where SPLITSERVE_AUDIT names a file; each scheduler process writes `FILE.PID.json` about
once a second while it decodes. `serving.audit` reads them.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from serving import hooks_kernels

ENVIRONMENT = "SPLITSERVE_AUDIT"
_DSPARK = "sglang.srt.speculative.dspark_components"
DECODE = f"{_DSPARK}.dspark_worker_v2.DSparkWorkerV2._forward_decode"
ACCEPT = f"{_DSPARK}.dspark_verify.TargetVerifyExecutor.accept_and_finalize"
FORWARD = "sglang.srt.model_executor.model_runner.ModelRunner.forward"
NEEDS_CPU = "sglang.srt.managers.overlap_utils.decide_needs_cpu_seq_lens"
LOOPS = {
    "overlap": "sglang.srt.managers.scheduler.Scheduler.event_loop_overlap",
    "normal": "sglang.srt.managers.scheduler.Scheduler.event_loop_normal",
}
INTERVAL_SECONDS = 1.0

logger = logging.getLogger("serving.audit")


class Counters:
    """Counts of one scheduler process. Hooks never raise into SGLang."""

    def __init__(self, stem: str) -> None:
        self._path = Path(f"{stem}.{os.getpid()}.json")
        self.counts: Counter[str] = Counter()
        self.facts: dict[str, Any] = {}
        self._written = 0.0

    def before_loop(self, name: str) -> Callable[..., None]:
        """Before a scheduler's event loop is entered."""

        def hook(*_: Any, **__: Any) -> None:
            self.facts["event_loop"] = name
            self.write()

        return hook

    def after_needs_cpu(self, result: bool, *_: Any, **__: Any) -> None:
        """After SGLang has decided whether lengths are read back from the GPU every step."""
        self.facts["needs_cpu_seq_lens"] = bool(result)

    def after_forward(
        self, output: Any, runner: Any, forward_batch: Any, *_: Any, **__: Any
    ) -> None:
        """After a forward of the target or the draft: did a graph serve it?"""
        mode = forward_batch.forward_mode
        verifies = mode.is_target_verify()
        if not (verifies or mode.is_decode()):
            return
        who = "draft" if runner.is_draft_worker else "verify" if verifies else "decode"
        self.counts[f"{who}_{'graph' if output.can_run_graph else 'eager'}"] += 1
        if not runner.is_draft_worker:
            self._note_runner(runner)
            self.write(INTERVAL_SECONDS)

    def _note_runner(self, runner: Any) -> None:
        from sglang.srt.runtime_context import get_parallel

        self.facts["tp_rank"] = get_parallel().tp_rank
        self.facts["own_kernels"] = os.environ.get(hooks_kernels.ENVIRONMENT, "")
        backend = getattr(runner, "attn_backend", None)
        self.facts["attention"] = type(backend).__name__
        linear = getattr(backend, "linear_attn_backend", None)
        if linear is not None:
            self.facts["linear_attention"] = type(linear).__name__
            fused = getattr(linear, "_fused_chain_verify_fn", None)
            self.facts["fused_kda_verify"] = fused is not None
        self.facts["verify_glue"] = _glue_of(runner)

    def after_accept(self, _result: Any, _executor: Any, *_: Any, **arguments: Any) -> None:
        """After a round's accept: was it the graph's?"""
        self.counts["accept_graph" if arguments.get("folded_accept") else "accept_eager"] += 1

    def after_decode(self, _result: Any, worker: Any, *_: Any, **__: Any) -> None:
        """After a whole DSPARK step."""
        self.counts["dspark_steps"] += 1
        epilogue = worker._verify_executor.verify_epilogue
        self.facts["commit_in_graph"] = bool(epilogue is not None and epilogue.folds_commit)
        self.facts["state_commit_after_verify"] = bool(worker._need_mamba_verify_commit)
        self.facts["verify_ids_in_graph"] = worker.num_folded_verify_ids_steps
        self.facts["relayed_in_graph"] = worker.num_relayed_in_graph_steps
        self.facts["proposal_in_graph"] = worker._draft_sampler is not None
        self.facts["draft_glue"] = _glue_of(worker.draft_model_runner)

    def write(self, interval: float = 0.0) -> None:
        """Write the file, unless it is younger than `interval` seconds."""
        now = time.monotonic()
        if now - self._written < interval:
            return
        self._written = now
        try:
            partial = self._path.with_suffix(".partial")
            partial.write_text(json.dumps({"counts": dict(self.counts), "facts": self.facts}))
            partial.replace(self._path)
        except OSError:
            logger.exception("audit counters could not be written to %s", self._path)


def _glue_of(runner: Any) -> dict[str, int] | None:
    """How often a runner's attention metadata came from a graph of its own; None without one."""
    graphs = getattr(runner, "decode_cuda_graph_runner", None)
    glue = getattr(graphs, "_metadata_glue", None)
    return None if glue is None else {"graph": glue.replays, "eager": glue.eager}


def _quiet(hook: Callable[..., None]) -> Callable[..., None]:
    """A hook whose failure is logged once and leaves SGLang alone."""
    failed: list[Exception] = []

    def wrapped(*arguments: Any, **named: Any) -> None:
        try:
            hook(*arguments, **named)
        except Exception as error:
            if not failed:
                logger.exception("an audit hook failed; its counts are missing")
            failed[:] = [error]

    return wrapped


def register(register_hook: Callable[..., None], kind: Any, stem: str) -> None:
    """Hook what is counted."""
    counters = Counters(stem)
    for name, path in LOOPS.items():
        register_hook(path, _quiet(counters.before_loop(name)), kind.BEFORE)
    register_hook(NEEDS_CPU, _quiet(counters.after_needs_cpu), kind.AFTER)
    register_hook(FORWARD, _quiet(counters.after_forward), kind.AFTER)
    register_hook(ACCEPT, _quiet(counters.after_accept), kind.AFTER)
    register_hook(DECODE, _quiet(counters.after_decode), kind.AFTER)
