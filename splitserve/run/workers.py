"""The worker processes of a run, each made with what it needs and no more."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from dspark.checkpoint import save_draft
from dspark.config import DraftConfig
from dspark.initial import initial_draft
from dspark.model import DSparkDraft
from serving.ports import free_port
from splitserve.engine.base import SPARE_TOKENS, EngineSpec
from splitserve.run.coordinator import log_path
from splitserve.run.folder import RunFolder
from splitserve.run.memory import memory_fraction
from splitserve.run.plan import Plan, evaluator_spec, longest_request
from splitserve.run.process import ChildProcess
from splitserve.settings import RunSettings
from splitserve.target.info import context_window
from splitserve.train.checkpoint import read_meta
from splitserve.train.spec import TrainerSpec
from splitserve.transport.layout import RingAddress
from splitserve.transport.weights import ExchangeAddress, TensorEntry

FIRST_DRAFT = "first_draft"
"""In the run folder: the draft that an engine starts with, before it is given newer weights."""


def exchange_tensors(config: DraftConfig) -> list[TensorEntry]:
    """Every tensor of a draft as it is served: bfloat16, the confidence head in float32."""
    with torch.device("meta"):
        draft = DSparkDraft(config)
    return [
        (
            name,
            tuple(parameter.shape),
            "float32" if name.startswith("confidence_head.") else "bfloat16",
        )
        for name, parameter in draft.named_parameters()
    ]


class Workers:
    """Makes the worker processes of a run, each time with what it needs and no more."""

    def __init__(
        self,
        settings: RunSettings,
        folder: RunFolder,
        plan: Plan,
        rings: tuple[RingAddress, ...],
        exchange: ExchangeAddress | None,
        resume: str,
    ) -> None:
        self._settings, self._folder, self._plan = settings, folder, plan
        self._rings, self._exchange, self._resume = rings, exchange, resume

    def _start(
        self, role: str, name: str, spec: Any, num_threads: int, gpus: Mapping[str, str]
    ) -> ChildProcess:
        environment = {
            "OMP_NUM_THREADS": str(num_threads),
            "TOKENIZERS_PARALLELISM": "false",
            "PYTHONUNBUFFERED": "1",
            **gpus,
        }
        return ChildProcess(role, name, spec, log_path(self._folder, name), environment)

    def engine(self, number: int) -> ChildProcess:
        """One engine of the target half."""
        settings, plan = self._settings, self._plan
        engine = settings.engine
        evaluation = None
        if settings.speculates and number == 0:
            evaluation = evaluator_spec(settings, plan)
        longest = longest_request(self._settings, plan)
        spec = EngineSpec(
            target_path=plan.target.path,
            layer_ids=plan.draft.target_layer_ids,
            ring=self._rings[number],
            kind=engine.kind,
            dtype=settings.target.dtype,
            device=settings.layout.device,
            eos_token_ids=plan.target.eos_token_ids,
            context_length=self._context_length(longest),
            kv_cache_tokens=engine.kv_cache_tokens
            or engine.max_running_requests * (longest + SPARE_TOKENS),
            chunked_prefill_size=engine.chunked_prefill_size,
            max_running_requests=engine.max_running_requests,
            prefill_together=engine.prefill_together,
            num_threads=engine.num_threads,
            port=engine.port,
            log_file=str(log_path(self._folder, f"sglang-{number}" if number else "sglang")),
            selfcheck_tolerance=engine.selfcheck_tolerance,
            tp_size=plan.placement.tp_size,
            attention_backend=engine.attention_backend,
            mixed_chunk=engine.mixed_chunk,
            cuda_graph_batch_sizes=tuple(engine.cuda_graph_batch_sizes),
            memory_fraction=memory_fraction(self._settings, plan.memory),
            draft_path=self._first_draft() if self._settings.speculates else "",
            draft_step=int(read_meta(Path(self._resume))["step"]) if self._resume else 0,
            evaluation=evaluation,
            exchange=self._exchange,
            start_timeout_seconds=engine.start_timeout_seconds,
        )
        suffix = f"-{number}" if plan.placement.num_engines > 1 else ""
        return self._start(
            "engine",
            f"engine{suffix}",
            spec,
            engine.num_threads,
            plan.placement.engine_environment(number),
        )

    def _context_length(self, longest: int) -> int:
        """Longer than a chunk, so that the self-check covers a prefill in two of them, but no
        longer than requests need where the target has no positions for it."""
        window = context_window(self._plan.target.config)
        wanted = max(longest, self._settings.engine.chunked_prefill_size) + SPARE_TOKENS
        return wanted if window is None else max(longest + SPARE_TOKENS, min(wanted, window))

    def _first_draft(self) -> str:
        """Folder of the draft that an engine starts with: the checkpoint's, or a new one."""
        if self._resume:
            return str(Path(self._resume) / "draft")
        folder = self._folder.path.resolve() / FIRST_DRAFT
        if not folder.is_dir():
            settings, plan = self._settings, self._plan
            warm = plan.target.path if settings.draft.warm_start else ""
            draft = initial_draft(plan.draft, settings.seed, warm)
            save_draft(folder, plan.draft, dict(draft.state_dict()))
        return str(folder)

    def evaluator(self) -> ChildProcess:
        """The embedded speculative decoder."""
        spec = evaluator_spec(self._settings, self._plan)
        return self._start(
            "evaluator",
            "evaluator",
            spec,
            spec.num_threads,
            self._plan.placement.trainer_environment(0),
        )

    def trainers(self) -> list[ChildProcess]:
        """The draft half, one process per rank."""
        settings, plan = self._settings, self._plan
        layout = settings.layout
        port = layout.master_port or free_port()
        return [
            self._start(
                "trainer",
                f"trainer-{rank}",
                TrainerSpec(
                    rank=rank,
                    world_size=settings.num_ranks,
                    master_port=port,
                    # Of the GPUs that a rank sees, its own is the first.
                    device="cuda:0" if layout.on_gpu else "cpu",
                    num_threads=layout.train_threads,
                    target_path=plan.target.path,
                    draft=plan.draft,
                    objective=settings.objective,
                    train=settings.train,
                    row_tokens=settings.row_tokens,
                    warm_start=settings.draft.warm_start,
                    seed=settings.seed,
                    eval_every=settings.eval.every,
                    rings=self._rings,
                    checkpoints=str(self._folder.checkpoints.resolve()),
                    snapshots=str(self._folder.snapshots.resolve()),
                    exchange=self._exchange,
                    resume_from=self._resume,
                    collective_timeout_seconds=layout.collective_timeout_seconds,
                ),
                layout.train_threads,
                plan.placement.trainer_environment(rank),
            )
            for rank in range(settings.num_ranks)
        ]
