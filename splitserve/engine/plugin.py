"""The SGLang plugin: copies the states of marked requests into the ring.

SGLang loads it in each of its processes through the entry point group `sglang.srt.plugins`, in
every program of an environment where this package is installed. It therefore does nothing at all
unless SPLITSERVE_CAPTURE says so. Only the target's forward passes over prompt tokens are read;
what SGLang computes stays as it is.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
from dataclasses import asdict, astuple, dataclass
from typing import Any

from serving import plugin as serving_hooks
from splitserve.messages import SlotRef

ENVIRONMENT = "SPLITSERVE_CAPTURE"
RID_PREFIX = "splitserve-teach"
FORWARD = "sglang.srt.model_executor.model_runner.ModelRunner.forward"

logger = logging.getLogger("splitserve.capture")


@dataclass(frozen=True, slots=True)
class CaptureConfig:
    """What the plugin has to know; travels as JSON in the environment."""

    rings: dict[str, str]
    """Ring addresses, as JSON, by the name that a request's id carries."""
    device: str
    control: str = ""
    """Path of the engine's control block."""
    exchange: str = ""
    """Address of the draft's exchange buffer, as JSON; empty without one."""
    speculates: bool = False
    """Whether the engine runs a draft."""
    prefill_together: int = 1
    """Prompts that are prefilled at once, if there is something to decode."""

    def to_json(self) -> str:
        """The environment variable's value."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> CaptureConfig:
        """Read the environment variable's value. Raises ValueError."""
        try:
            return cls(**json.loads(text))
        except TypeError as error:
            raise ValueError(f"{ENVIRONMENT} has other fields than expected: {error}") from error


def teach_rid(ring: str, slot: SlotRef, name: str) -> str:
    """The id of a request whose states are to go into a slot; unique, as generations are."""
    return ":".join([RID_PREFIX, ring, *map(str, astuple(slot)), name])


def parse_rid(rid: object) -> tuple[str, SlotRef] | None:
    """The ring's name and the slot of such an id; None for any other request."""
    if not isinstance(rid, str) or not rid.startswith(RID_PREFIX + ":"):
        return None
    _, ring, *numbers, _ = rid.split(":", 7)
    return ring, SlotRef(*map(int, numbers))


class Capture:
    """The hook's state: the rings, attached when first needed."""

    def __init__(self, config: CaptureConfig) -> None:
        self._config = config
        self._writers: dict[str, Any] = {}

    def after_forward(
        self, output: Any, runner: Any, forward_batch: Any, *_: Any, **__: Any
    ) -> None:
        """Copy the rows of marked requests; never raises into SGLang.

        The outputs are views of memory that the next forward pass reuses; on a GPU the copies
        come before that pass in the current stream, on a CPU they are done before this returns.
        """
        if runner.is_draft_worker or forward_batch.rids is None:
            return
        # Verifying drafts counts as extending to SGLang.
        if not forward_batch.forward_mode.is_extend_without_speculative():
            return
        marked = [
            (index, *parsed)
            for index, rid in enumerate(forward_batch.rids)
            if (parsed := parse_rid(rid)) is not None
        ]
        if not marked:
            return
        try:
            self._copy(output.logits_output, forward_batch, marked)
        except Exception as error:
            logger.exception("capture failed; the samples of this forward pass are spoilt")
            for _index, ring, slot in marked:
                self._fail(ring, slot, error)

    def _copy(
        self, logits_output: Any, forward_batch: Any, marked: list[tuple[int, str, SlotRef]]
    ) -> None:
        lengths = [int(n) for n in forward_batch.extend_seq_lens_cpu]
        prefixes = [int(n) for n in forward_batch.extend_prefix_lens_cpu]
        features, states = logits_output.hidden_states, logits_output.last_hidden_states
        if features is None or states is None:
            raise RuntimeError("SGLang returned no hidden states: capture-only mode is not active")
        num_rows = sum(lengths)
        input_ids, positions = forward_batch.input_ids, forward_batch.positions
        for name, rows in (("features", features), ("states", states), ("input ids", input_ids)):
            # Padding may follow, but rows must never be missing.
            if rows.shape[0] < num_rows:
                raise RuntimeError(f"{num_rows} rows in the batch, {rows.shape[0]} {name}")
        from splitserve.transport.ring import BatchRows

        first_rows = list(itertools.accumulate(lengths, initial=0))
        arrays = [rows[:num_rows] for rows in (features, states, input_ids, positions)]
        for ring in {ring for _index, ring, _slot in marked}:
            if (writer := self._writer(ring)) is not None:
                batch = [
                    BatchRows(slot, prefixes[index], first_rows[index], lengths[index])
                    for index, name, slot in marked
                    if name == ring
                ]
                for slot in writer.write_batch(batch, *arrays):
                    logger.warning("slot %s is another sample's by now", slot)

    def _fail(self, ring: str, slot: SlotRef, error: Exception) -> None:
        try:
            if (writer := self._writer(ring)) is not None:
                writer.fail(slot, error)
        except Exception:
            # The slot is another sample's by now, or the ring is gone: nothing left to spoil.
            logger.exception("slot %s could not be marked as spoilt", slot)

    def _writer(self, ring: str) -> Any | None:
        """This rank's writer; None where the ring has no shard for it.

        Under plain tensor parallelism every rank holds the same full-width values.
        """
        if ring not in self._writers:
            from splitserve.transport.ring import RingAddress, RingWriter

            address, rank = RingAddress.from_json(self._config.rings[ring]), tensor_parallel_rank()
            has_shard = rank < address.layout.num_shards
            self._writers[ring] = RingWriter.attach(address, rank) if has_shard else None
        return self._writers[ring]


def tensor_parallel_rank() -> int:
    """This scheduler's rank in the target's tensor-parallel group."""
    from sglang.srt.runtime_context import get_parallel

    return get_parallel().tp_rank


def register() -> None:
    """Entry point. Hooks the target's forward pass if SPLITSERVE_CAPTURE is set."""
    serving_hooks.register()
    text = os.environ.get(ENVIRONMENT)
    if not text:
        return
    config = CaptureConfig.from_json(text)
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(FORWARD, Capture(config).after_forward, HookType.AFTER)
    if config.prefill_together > 1:
        from splitserve.engine import prefills

        gate = prefills.PrefillGate(config.prefill_together)
        HookRegistry.register(prefills.PREFILL, gate.new_prefill, HookType.AROUND)
    if config.speculates:
        from splitserve.engine import renorm, speculative

        recorder = speculative.ProposalRecorder(config.control)
        HookRegistry.register(
            speculative.LOGITS_PROCESSOR, speculative.keep_last_states, HookType.AFTER
        )
        HookRegistry.register(speculative.OBSERVE, recorder.after_verify, HookType.AFTER)
        if renorm.is_needed():
            HookRegistry.register(renorm.TOP_K, renorm.top_k_renorm, HookType.REPLACE)
            HookRegistry.register(renorm.TOP_P, renorm.top_p_renorm, HookType.REPLACE)
    if config.device == "cpu":
        _register_cpu(HookRegistry.register, HookType)


def _register_cpu(register_hook: Any, kind: Any) -> None:
    """What SGLang lacks, or does slowly, on a CPU without kernels of its own."""
    from splitserve.engine import cpu_attention, cpu_linear, cpu_sampling, rotary_shim

    rotary_shim.install()
    backend = cpu_attention.BACKEND
    register_hook(f"{backend}.init_forward_metadata", cpu_attention.plan_forward, kind.AFTER)
    register_hook(
        f"{backend}._run_sdpa_forward_decode", cpu_attention.decode_attention, kind.AROUND
    )
    register_hook(
        f"{backend}._run_sdpa_forward_extend", cpu_attention.extend_attention, kind.AROUND
    )
    register_hook(cpu_sampling.SAMPLE, cpu_sampling.note_seeds, kind.BEFORE)
    register_hook(cpu_sampling.SIMPLE, cpu_sampling.draw_simple, kind.REPLACE)
    register_hook(cpu_sampling.FILTERED, cpu_sampling.draw_filtered, kind.AROUND)
    if cpu_linear.is_supported():
        register_hook(cpu_linear.LINEAR, cpu_linear.linear, kind.AROUND)
        register_hook(cpu_linear.LM_HEAD, cpu_linear.lm_head_logits, kind.AROUND)
