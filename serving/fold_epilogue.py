"""The accept at the end of a verify graph, for targets for which SGLang does not capture it.

Only imported inside a scheduler process of SGLang.
"""

from __future__ import annotations

import logging
from typing import Any

from sglang.srt.environ import envs
from sglang.srt.runtime_context import get_exec
from sglang.srt.speculative.dspark_components.dspark_verify import (
    CommitInjectCtx,
    DsparkVerifyEpilogue,
    target_uses_fused_argmax,
)

from serving.hooks_fold import commit_refusal

logger = logging.getLogger("serving.fold")


class FoldedEpilogue(DsparkVerifyEpilogue):
    """SGLang's static epilogue with a dense draft's commit, and a way back.

    Source: SGLang 0.5.23, srt/speculative/dspark_components/dspark_verify.py:565.
    """

    def __init__(self, worker: Any, *, commit: bool, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._worker = worker
        self._commit_wanted = commit
        self._commit_works: bool | None = None
        # The captured graphs read copies of weights that only this keeps alive.
        self._bundle: Any = None
        self.commit_captured = False
        self.retired = ""
        self.commit_retired = ""
        self.num_folded_steps = 0

    @property
    def folds_commit(self) -> bool:
        """Whether the verify graph writes the draft's keys and values.

        SGLang's own answer is about one kind of pool.
        """
        return bool(self._commit_wanted and self._commit_works and not self.commit_retired)

    def capture_hook(self, runner: Any, out: Any, forward_batch: Any, num_tokens: int) -> None:
        """At the end of every target forward that warms up a graph or is captured."""
        if self.retired:
            return
        verifies = forward_batch.forward_mode.is_target_verify()
        if verifies and not runner.model_runner.is_draft_worker:
            self._prepare_commit()
        if _is_capturing():
            super().capture_hook(runner, out, forward_batch, num_tokens)
            self.commit_captured = self.commit_captured or (verifies and self.folds_commit)
            return
        try:
            super().capture_hook(runner, out, forward_batch, num_tokens)
        except Exception as error:
            self.retire(f"{type(error).__name__}: {error}")

    def _prepare_commit(self) -> None:
        if not self._commit_wanted or self._commit_works is not None:
            return
        try:
            why = commit_refusal(self._worker)
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
        self._commit_works = not why
        if why:
            logger.warning("fold: the draft's commit stays as it is: %s", why)
            return
        worker = self._worker
        pool = worker.draft_model_runner.token_to_kv_pool
        self._bundle = worker.draft_model._fused_kv_write_bundle(pool)

    def begin_static_step(self, bs: int, armed: bool) -> None:
        """Before a verify graph is launched: the gate that lets it write keys and values."""
        super().begin_static_step(bs, armed and not self.commit_retired)

    def note_static_verify(self, bs: int) -> None:
        """After a step whose accept came from the graph."""
        self.num_folded_steps += 1
        super().note_static_verify(bs)

    def retire(self, why: str) -> None:
        """Give the accept back to SGLang for good; graphs that hold it compute it unread."""
        logger.warning("fold: left out for good, the step goes on as before: %s", why)
        self.retired = why
        self.commit_retired = self.commit_retired or why
        # The gate is checked on the GPU: shut, captured commits write nothing.
        self.inject_gate_buf.zero_()
        self._worker._verify_epilogue = None
        self._worker._verify_executor.verify_epilogue = None

    def retire_commit(self, why: str) -> None:
        """Give the commit alone back for good."""
        if not self.commit_retired:
            logger.warning("fold: the draft's commit is the host's again: %s", why)
            self.commit_retired = why


def _is_capturing() -> bool:
    import torch

    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def build_epilogue(worker: Any, parts: frozenset[str]) -> FoldedEpilogue:
    """The epilogue for a DSparkWorkerV2, as SGLang would build it for its own targets.

    Source: SGLang 0.5.23, srt/speculative/dspark_components/dspark_worker_v2.py:414.
    """
    return FoldedEpilogue(
        worker,
        commit="commit" in parts,
        max_bs=max(get_exec().graph.cuda_graph_config.decode.bs),
        verify_num_draft_tokens=worker.verify_num_draft_tokens,
        device=worker.device,
        tp_sync=worker._tp_sync,
        fused_argmax=target_uses_fused_argmax(worker.target_worker),
        simulated_correct_len=worker._simulated_correct_len,
        simulate_fold=envs.SGLANG_DSPARK_SIMULATE_FOLD.get(),
        fused_accept_tail=envs.SGLANG_DSPARK_FUSED_ACCEPT_TAIL.get(),
        accept_tail_min_bs=envs.SGLANG_DSPARK_ACCEPT_TAIL_MIN_BS.get(),
        accept_tail_max_bs=envs.SGLANG_DSPARK_ACCEPT_TAIL_MAX_BS.get(),
        post_fold="relay" in parts,
        commit_ctx=CommitInjectCtx(
            draft_model=worker.draft_model,
            block_pos_offsets=worker._block_pos_offsets,
            resolve_pool=lambda: worker.draft_model_runner.token_to_kv_pool,
            resolve_req_to_token=lambda: worker.model_runner.req_to_token_pool.req_to_token,
            kv_injector=worker._kv_injector,
        ),
    )
