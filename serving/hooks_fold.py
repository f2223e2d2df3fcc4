"""Less host time between the graphs of a DSPARK step: accept, commit and metadata into graphs.

With static verification SGLang 0.5.23 captures the accept and its book-keeping only for one family
of targets (srt/speculative/dspark_components/dspark_worker_v2.py:400). For all others a step runs
these one by one from the host after the verify graph: argmax, match, lengths, output tokens, then
projection, norm, rotation and store of the draft's keys and values of what was accepted. The parts
below are captured into the graphs instead, each on its own:

    accept   the greedy accept, its lengths and tokens, at the end of the verify graph
    commit   the draft's keys and values of accepted tokens, behind it (asks for accept)
    relay    lengths and bonus token for the next step, behind it (asks for accept)
    glue     attention metadata of draft and verify in a graph each (FlashAttention only)

What is computed stays the same kernels on the same values. SGLang runs the new parts twice without
a graph before each capture; if they fail there, they are left out for good and the step goes on as
it did. Steps that sample, constrain or penalize take SGLang's own path, as they do where SGLang
folds itself. When the draft's weights are replaced, `commit` ends for good: the graph holds copies
of the old ones.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

ENVIRONMENT = "SPLITSERVE_FOLD"
PARTS = ("accept", "commit", "relay", "glue")
WORKER = "sglang.srt.speculative.dspark_components.dspark_worker_v2.DSparkWorkerV2.__init__"
LOAD = "sglang.srt.models.dspark.DSparkDraftMixin.load_weights"
_BACKEND = "sglang.srt.layers.attention.base_attn_backend.AttentionBackend"
GLUE_DRAFT = f"{_BACKEND}.glue_draft_metadata"
GLUE_VERIFY = f"{_BACKEND}.glue_target_verify_metadata"
GLUE_SWITCH = "SGLANG_OPT_DSV41_TARGET_VERIFY_METADATA_GLUE"
SGLANG_SWITCHES = {
    "SGLANG_DSPARK_FUSED_ACCEPT_TAIL": "the whole accept in one kernel",
    "SGLANG_OPT_DSV41_DSPARK_MID_FOLD": "the verify window from the draft graph, not from the host",
    "SGLANG_OPT_DSV41_DSPARK_PREPARE_INPUTS_ONCE": "positions, slots and anchor in one launch",
    "SGLANG_OPT_DSV41_DSPARK_SKIP_PREFILLED_INPUTS": "verify inputs are copied once, not twice",
    GLUE_SWITCH: "takes the verify part of glue",
    "SGLANG_OPT_CUDA_GRAPH_FILL_FAST_PATH": "inputs of an unpadded replay in one copy",
    "SGLANG_OPT_SKIP_GLUED_REPLAY_VIEW": "no host view of a batch whose metadata is captured",
}
"""Switches of SGLang that shorten the same seams and hold for any target, off by default.
Source: SGLang 0.5.23, srt/environ.py:572-584, 1648 and 1888-1900, and where they are read."""

LOG_MARK = "fold: "
"""Every line that this writes into SGLang's log has it."""

logger = logging.getLogger("serving.fold")


def parse_parts(text: str) -> tuple[str, ...]:
    """The parts named in the environment variable.

    Raises:
        ValueError: an unknown part, or one without the part that it asks for.
    """
    parts = tuple(part.strip() for part in text.split(",") if part.strip())
    unknown = [part for part in parts if part not in PARTS]
    lonely = {"commit", "relay"} & set(parts) and "accept" not in parts
    if unknown or lonely:
        raise ValueError(
            f"{ENVIRONMENT}={text!r} is not usable; allowed: {', '.join(PARTS)}, commit and relay "
            "only with accept; correct it"
        )
    return parts


def register(register_hook: Callable[..., None], kind: Any, parts: Iterable[str]) -> None:
    """Hook what the parts ask for."""
    fold = Fold(frozenset(parts))
    if "accept" in fold.parts:
        register_hook(WORKER, fold.after_worker, kind.AFTER)
        register_hook(LOAD, fold.after_load, kind.AFTER)
    if "glue" in fold.parts:
        register_hook(GLUE_DRAFT, fold.glue, kind.AROUND)
        register_hook(GLUE_VERIFY, fold.glue, kind.AROUND)


def refusal(worker: Any) -> str:
    """Why this DSparkWorkerV2's accept cannot be folded; empty if it can."""
    from sglang.srt.runtime_context import get_parallel
    from sglang.srt.utils import is_cuda

    if not worker._hosts_draft:
        return "this rank hosts no draft"
    for bad, why in (
        (worker._verify_epilogue is not None, "SGLang folds the accept itself"),
        (worker._verify_planner.mode_value != "static", "verification is not static"),
        (worker._draft_is_moe, "the draft is not dense"),
        (not worker._decode_graph_allowed, "decoding is not captured"),
        (get_parallel().attn_dp_enabled, "attention is data-parallel"),
        (get_parallel().pp_size != 1, "the target is pipelined"),
        (not is_cuda(), "this is no NVIDIA GPU"),
    ):
        if bad:
            return why
    return ""


def commit_refusal(worker: Any) -> str:
    """Why the draft's keys and values cannot be written from the verify graph; empty if they can.

    Asked at the first warm-up, when pools and weights are in place.
    """
    target, draft = worker.model_runner, worker.draft_model_runner
    if target.kv_index_translator.is_translating or draft.kv_index_translator.is_translating:
        return "slots have other numbers in the draft's pool"
    if worker._kv_injector.swa_ring_size is not None:
        return "the draft's pool is a ring"
    if worker.draft_model._fused_kv_write_bundle(draft.token_to_kv_pool) is None:
        return "the draft has no fused write of keys and values"
    return ""


def glue_refusal(backend: Any) -> str:
    """Why an attention backend's metadata may not be captured; empty if it may.

    FlashAttention with a chain of drafts reads fixed buffers and the pool's tables only
    (srt/layers/attention/flashattention_backend.py, `_set_decode_page_metadata`).
    """
    for bad, why in (
        (type(backend).__name__ != "FlashAttentionBackend", "no FlashAttention backend"),
        (backend.needs_cpu_seq_lens, "host sequence lengths"),
        (getattr(backend, "topk", 0) > 1, "a tree of drafts"),
        (getattr(backend, "use_sliding_window_kv_pool", True), "a sliding-window pool"),
        (backend.kv_index_translator.reads_are_translated, "a translated pool"),
        (getattr(backend, "is_encoder_decoder", False), "an encoder"),
    ):
        if bad:
            return why
    return ""


class Fold:
    """The hooks' state in one scheduler process."""

    def __init__(self, parts: frozenset[str]) -> None:
        self.parts = parts
        self.epilogue: Any = None

    def after_worker(self, _result: Any, worker: Any, *_: Any, **__: Any) -> None:
        """After a DSparkWorkerV2 is made, before anything is captured: give it an epilogue."""
        if why := refusal(worker):
            logger.warning("fold: the accept stays as it is: %s", why)
            return
        from serving.fold_epilogue import build_epilogue

        self.epilogue = build_epilogue(worker, self.parts)
        worker._verify_epilogue = self.epilogue
        worker._verify_executor.verify_epilogue = self.epilogue
        worker.model_runner.capture_tail_hooks.append(self.epilogue.capture_hook)
        logger.warning("fold: %s into the verify graph", ", ".join(sorted(self.parts - {"glue"})))

    def after_load(self, _result: Any, *_: Any, **__: Any) -> None:
        """After weights of a draft are loaded: what was captured of them is old."""
        if self.epilogue is not None and self.epilogue.commit_captured:
            self.epilogue.retire_commit("the draft's weights were replaced")

    def glue(self, original: Callable[[Any], str], backend: Any) -> str:
        """Instead of a backend's own answer, where it declares nothing."""
        why: str = original(backend)
        if not why:
            return why
        ours = glue_refusal(backend)
        if ours:
            logger.warning("fold: attention metadata stays as it is: %s", ours)
        else:
            logger.warning("fold: attention metadata of %s in a graph", type(backend).__name__)
        return ours
