"""The target in SGLang: one engine generates and teaches, many requests at once.

SGLang's scheduler and detokenizer are processes of their own. Their death reaches this process as
a SIGQUIT, which is noted here and reported by `failure`, instead of SGLang's own answer to it (it
kills the whole process tree without a word).
"""

from __future__ import annotations

import asyncio
import itertools
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from serving.leftovers import EngineRemains
from serving.measure import Answer, record_stream
from serving.processes import kill_descendants
from serving.version import require_sglang
from splitserve.engine.arguments import (
    MAIN_RING,
    PROBE_RING,
    convention,
    engine_arguments,
    environment,
)
from splitserve.engine.base import EngineError, EngineSpec, Result, ResultSink, make_probe_ring
from splitserve.engine.control import ControlBlock
from splitserve.engine.cpu_sampling import generate_rid
from splitserve.engine.draft_loader import LOADER, update_messages
from splitserve.engine.plugin import teach_rid
from splitserve.engine.plugin_check import check_plugin
from splitserve.engine.served import ServedEvaluator
from splitserve.engine.speculative import proposal_rid
from splitserve.messages import (
    EVALUATION,
    DraftUpdated,
    Evaluate,
    Generate,
    Generated,
    Rejected,
    Sampling,
    SlotRef,
    Taught,
    Teach,
    UpdateDraft,
)
from splitserve.target.info import capturable_layers, read_target
from splitserve.transport.ring import RingReader, SampleStates

CAPTURE_SECONDS = 10.0


# One engine per process, as SGLang has it; filled by the signal handler, which SGLang pickles.
_child_deaths: list[int] = []


def note_child_death(signum: int, _frame: object) -> None:
    """Signal handler: no locks, no logging, no sending."""
    _child_deaths.append(signum)


class SGLangEngine:
    """A running SGLang engine: it captures, and speculates where it is given a draft.

    Made in the main thread (SGLang's children die with the thread that started them). Results go
    to `sink` from a thread of the engine. Raises ValueError for settings that cannot work and
    EngineError if SGLang does not come up.
    """

    def __init__(self, spec: EngineSpec, sink: ResultSink) -> None:
        self.spec = spec
        self._sink = sink
        # Ids must differ, also where the coordinator asks for a response again.
        self._count = itertools.count()
        self._proposals = itertools.count(1)
        self.draft_step = spec.draft_step if spec.draft_path else -1
        """Of the draft in place; -1 where there is none."""
        _child_deaths.clear()
        self._version = require_sglang()
        check_plugin()
        self.target = read_target(spec.target_path, need_tokenizer=False)
        _check_layers(spec, self.target.architecture, self.target.num_layers)
        self.eos_token_ids = spec.eos_token_ids or self.target.eos_token_ids
        self.ring = RingReader.attach(spec.ring)
        # The self-check's samples have a ring of their own: the other one is not ours to allocate.
        self.probe_ring = make_probe_ring(spec)
        self._probe_reader = RingReader.attach(self.probe_ring.address)
        self.control = ControlBlock.create()
        started = time.monotonic()
        self._engine = self._start()
        self._remains = EngineRemains(self._engine)
        self._evaluator = ServedEvaluator(self, spec.evaluation) if spec.evaluation else None
        self.start_seconds = time.monotonic() - started
        self._loop = self._engine.loop
        self._thread = threading.Thread(target=self._run_loop, name="sglang-requests", daemon=True)
        self._thread.start()

    def _start(self) -> Any:
        spec = self.spec
        for name, value in environment(spec, self.probe_ring.address, self.control.path).items():
            os.environ[name] = value
        try:
            from sglang import Engine

            return Engine(
                **engine_arguments(spec, self.target.architecture),
                custom_sigquit_handler=note_child_death,
            )
        except ValueError:
            raise
        except BaseException as error:
            # A scheduler that dies while starting: EOFError, RuntimeError or SystemExit.
            kill_descendants()
            raise EngineError(
                f"SGLang did not start ({type(error).__name__}: {error}); its own account is in "
                f"{spec.log_file or 'the output above'}"
            ) from error

    @property
    def failure(self) -> str | None:
        """Why the engine is dead, or None while it lives. Its requests get no answer then."""
        if not _child_deaths:
            return None
        return (
            "SGLang's scheduler died; its own account is in "
            f"{self.spec.log_file or 'the output above'}"
        )

    def info(self) -> dict[str, object]:
        """Names and versions for the run's record."""
        return {
            "engine": "sglang",
            "version": self._version,
            "architecture": self.target.architecture,
            "capture": convention(self.spec, self.target.architecture),
            "layer_ids": list(self.spec.layer_ids),
            "device": self.spec.device,
            "dtype": self.spec.dtype,
            "start_seconds": round(self.start_seconds, 1),
        }

    def submit(self, request: Generate | Teach | Evaluate | UpdateDraft) -> None:
        """Take a request from any thread; its result goes to the sink."""
        asyncio.run_coroutine_threadsafe(self._answer(request), self._loop)

    def close(self) -> None:
        """End SGLang: afterwards none of its processes is left."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=10)
        self._remains.end()
        self._probe_reader.close()
        self.probe_ring.close()
        self.ring.close()
        self.control.close()

    def probe(self, token_ids: tuple[int, ...], num_logprobs: int) -> ProbeResult:
        """Teach one sequence into the private ring, with the target's own log-probabilities.

        Returns its slot, the reason if it was not captured, and the log-probability of each of the
        last `num_logprobs` tokens. Blocks; the slot is the caller's to free.
        """
        slot = self.probe_ring.allocate(len(token_ids))
        assert slot is not None, "the self-check holds more probes than its ring has room for"
        future = asyncio.run_coroutine_threadsafe(
            self._probe(token_ids, slot, num_logprobs), self._loop
        )
        return future.result(timeout=self.spec.start_timeout_seconds)

    def _run_loop(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    async def _answer(self, request: Generate | Teach | Evaluate | UpdateDraft) -> None:
        if isinstance(request, UpdateDraft):
            await self._update(request)
            return
        if isinstance(request, Evaluate):
            assert self._evaluator is not None, "only an engine that speculates evaluates"
            await self._evaluator.answer(request, self._sink)
            return
        slot = request.slot if isinstance(request, Teach) else None
        name = request.sample_id if isinstance(request, Teach) else request.request_id
        result: Result
        try:
            if isinstance(request, Teach):
                result = await self._teach(request)
            else:
                result = await self._generate(request)
        except Exception as error:
            result = Rejected(name, slot, f"engine_error: {type(error).__name__}: {error}")
        self._sink(result)

    async def _update(self, request: UpdateDraft) -> None:
        try:
            update = await self.update_draft(request.step, request.draft_path)
            self._sink(DraftUpdated(update.step, update.seconds))
        except Exception as error:
            self._sink(Rejected(EVALUATION, None, f"engine_error: {type(error).__name__}: {error}"))

    async def decode(self, token_ids: Sequence[int], sampling: Sampling, rid: str) -> Answer:
        """One response as SGLang gives it, with the times of its tokens.

        Raises EngineError if SGLang gives the request up.
        """
        stream = await self._engine.async_generate(
            input_ids=list(token_ids),
            sampling_params=self._sampling_params(sampling),
            rid=rid,
            stream=True,
        )
        try:
            return await record_stream(stream)
        except ValueError as error:
            raise EngineError(f"request {rid}: {error}") from error

    async def update_draft(self, step: int, folder: str) -> DraftUpdate:
        """Give the running engine the draft of that step; requests go on where they are.

        The weights come from the exchange buffer while it holds that step, else from the folder.
        Raises EngineError if SGLang refuses them.
        """
        from sglang.srt.managers.io_struct import (
            BeginWeightUpdateReqInput,
            ContinueGenerationReqInput,
            EndWeightUpdateReqInput,
            PauseGenerationReqInput,
            UpdateWeightsFromTensorReqInput,
        )

        manager = self._engine.tokenizer_manager
        weights = UpdateWeightsFromTensorReqInput(
            serialized_named_tensors=update_messages(step, folder, self.spec.tp_size),
            load_format=LOADER,
            # The cache is the target's, and old drafts' entries end with their requests.
            flush_cache=False,
            selector="draft",
        )
        started = time.monotonic()
        # Otherwise the update would wait until no request is left.
        await manager.pause_generation(PauseGenerationReqInput(mode="in_place"))
        try:
            _require(await manager.begin_weight_update(BeginWeightUpdateReqInput(selector="draft")))
            _require(await manager.update_weights_from_tensor(weights))
            _require(await manager.end_weight_update(EndWeightUpdateReqInput()))
        finally:
            await manager.continue_generation(ContinueGenerationReqInput())
        seconds = time.monotonic() - started
        loaded, source = self.control.draft()
        if loaded != step:
            raise EngineError(f"the engine's draft is of step {loaded} after an update to {step}")
        self.draft_step = step
        return DraftUpdate(step, source.name.lower(), seconds)

    async def propose(self, token_ids: Sequence[int], num_tokens: int) -> tuple[list[int], SlotRef]:
        """The engine's own first proposal after a prompt: anchor and drafts; and a slot of the
        private ring that holds the prompt's states, the caller's to free.

        Raises EngineError if none was seen.
        """
        slot = self.probe_ring.allocate(len(token_ids))
        assert slot is not None, "nothing else is in the private ring by now"
        number = next(self._proposals)
        await self._prefill(tuple(token_ids), teach_rid(PROBE_RING, slot, f"probe{number}"))
        reason = self._probe_reader.check(slot, torch.tensor(list(token_ids)))
        sampling = Sampling(temperature=0.0, max_new_tokens=num_tokens)
        await self.decode(token_ids, sampling, proposal_rid(number))
        tokens = self.control.proposal(number)
        if reason is not None or tokens is None:
            self.probe_ring.free(slot)
            raise EngineError(
                f"the engine's proposal could not be read: {reason or 'no draft was verified'}"
            )
        return tokens, slot

    def read_probe(self, slot: SlotRef) -> SampleStates:
        """The states in a complete slot of the private ring, as views."""
        return self._probe_reader.read(slot)

    async def _generate(self, request: Generate) -> Generated | Rejected:
        draft_step = self.draft_step
        answer = await self._engine.async_generate(
            input_ids=list(request.token_ids),
            sampling_params=self._sampling_params(request.sampling),
            rid=generate_rid(request.sampling.seed, f"{request.request_id}#{next(self._count)}"),
        )
        kind, detail = _finish(answer)
        if kind not in ("stop", "length"):
            return Rejected(request.request_id, None, f"engine_error: {kind}: {detail}")
        output_ids = list(answer["output_ids"])
        if kind == "stop" and isinstance(detail, int) and output_ids[-1:] != [detail]:
            output_ids.append(detail)
        return Generated(request.request_id, tuple(output_ids), kind, draft_step)

    def _sampling_params(self, sampling: Sampling) -> dict[str, Any]:
        return {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "max_new_tokens": sampling.max_new_tokens,
            "stop_token_ids": list(self.eos_token_ids),
        }

    async def _teach(self, request: Teach) -> Taught | Rejected:
        rid = teach_rid(MAIN_RING, request.slot, request.sample_id)
        answer = await self._prefill(request.token_ids, rid)
        kind, detail = _finish(answer)
        if kind not in ("stop", "length"):
            return Rejected(request.sample_id, request.slot, f"engine_error: {kind}: {detail}")
        reason = await self._captured(request.slot, torch.tensor(request.token_ids))
        if reason is not None:
            return Rejected(request.sample_id, request.slot, reason)
        return Taught(request.sample_id, request.slot)

    async def _captured(self, slot: SlotRef, token_ids: torch.Tensor) -> str | None:
        """None once every shard of the slot is complete, else the reason why it is not.

        The answer says that rank 0 is through; the others' copies may be a moment behind.
        """
        deadline = time.monotonic() + CAPTURE_SECONDS
        while (reason := self.ring.check(slot, token_ids)) == "partial_capture":
            if self.spec.device == "cpu" or time.monotonic() > deadline:
                break
            await asyncio.sleep(0.001)
        return reason

    async def _prefill(
        self, token_ids: tuple[int, ...], rid: str, **options: Any
    ) -> dict[str, Any]:
        # Not greedy: one greedy row sends its whole batch through a sort of the vocabulary.
        params = {"temperature": 1.0, "max_new_tokens": 1, "ignore_eos": True}
        return await self._engine.async_generate(
            input_ids=list(token_ids), sampling_params=params, rid=rid, **options
        )

    async def _probe(
        self, token_ids: tuple[int, ...], slot: SlotRef, num_logprobs: int
    ) -> ProbeResult:
        answer = await self._prefill(
            token_ids,
            teach_rid(PROBE_RING, slot, "probe"),
            return_logprob=True,
            logprob_start_len=len(token_ids) - num_logprobs - 1,
        )
        reason = self._probe_reader.check(slot, torch.tensor(token_ids))
        rows = self._probe_reader.rows_written(slot)
        entries = answer["meta_info"].get("input_token_logprobs") or []
        logprobs = [float(entry[0]) for entry in entries[-num_logprobs:] if entry[0] is not None]
        return slot, reason, rows, logprobs


@dataclass(frozen=True, slots=True)
class DraftUpdate:
    """How other weights came into the engine's draft."""

    step: int
    source: str
    """"device" or "folder"."""
    seconds: float
    """From the pause of all requests to their going on."""


def _require(result: tuple[bool, str]) -> None:
    good, message = result
    if not good:
        raise EngineError(f"SGLang refused the draft's new weights: {message}")


ProbeResult = tuple[SlotRef, str | None, int, list[float]]


def _check_layers(spec: EngineSpec, architecture: str, num_layers: int) -> None:
    allowed = capturable_layers(architecture, num_layers)
    wrong = [layer for layer in spec.layer_ids if layer not in allowed]
    if wrong:
        raise ValueError(
            f"draft.target_layer_ids={list(spec.layer_ids)}; allowed for a {architecture} of "
            f"{num_layers} layers: {allowed.start} to {allowed.stop - 1}; remove {wrong}"
        )


def _finish(answer: dict[str, Any]) -> tuple[str, Any]:
    """SGLang's finish reason and what it says beside it (matched token or message)."""
    reason = answer["meta_info"].get("finish_reason") or {}
    return reason.get("type", "unknown"), reason.get("matched", reason.get("message"))
