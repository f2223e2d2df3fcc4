"""The target in SGLang: one engine generates and teaches, many requests at once.

SGLang's scheduler and detokenizer are processes of their own. Their death reaches this process as
a SIGQUIT, which is noted here and reported by `failure`, instead of SGLang's own answer to it (it
kills the whole process tree without a word).
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import socket
import threading
import time
from typing import Any

import torch

from serving.version import require_sglang
from splitserve.engine.base import EngineError, EngineSpec, Result, ResultSink
from splitserve.engine.cpu_sampling import generate_rid
from splitserve.engine.plugin import ENVIRONMENT, CaptureConfig, teach_rid
from splitserve.engine.plugin_check import check_plugin
from splitserve.engine.processes import kill_descendants
from splitserve.messages import Generate, Generated, Rejected, Sampling, SlotRef, Taught, Teach
from splitserve.target.info import capturable_layers, capture_convention, read_target
from splitserve.transport.ring import RingOwner, RingWriter

# SGLang keeps a few tokens of the context back; a sample as long as ours must still fit.
CONTEXT_MARGIN_TOKENS = 16
MAIN_RING, PROBE_RING = "main", "probe"


# One engine per process, as SGLang has it; filled by the signal handler, which SGLang pickles.
_child_deaths: list[int] = []


def note_child_death(signum: int, _frame: object) -> None:
    """Signal handler: no locks, no logging, no sending."""
    _child_deaths.append(signum)


class SGLangEngine:
    """A running SGLang engine in capture-only mode.

    Made in the main thread (SGLang's children die with the thread that started them). Results go
    to `sink` from a thread of the engine. Raises ValueError for settings that cannot work and
    EngineError if SGLang does not come up.
    """

    def __init__(self, spec: EngineSpec, sink: ResultSink) -> None:
        self.spec = spec
        self._sink = sink
        # Ids must differ, also where the coordinator asks for a response again.
        self._count = itertools.count()
        _child_deaths.clear()
        self._version = require_sglang()
        check_plugin()
        self.target = read_target(spec.target_path, need_tokenizer=False)
        _check_layers(spec, self.target.architecture, self.target.num_layers)
        self.eos_token_ids = spec.eos_token_ids or self.target.eos_token_ids
        self.ring = RingWriter.attach(spec.ring_path, spec.ring_layout)
        # The self-check's samples have a ring of their own: the other one is not ours to allocate.
        probe_bytes = 4 * spec.ring_layout.slot_bytes(spec.context_length)
        self.probe_ring = RingOwner.create(probe_bytes, spec.ring_layout)
        self._probe_writer = RingWriter.attach(self.probe_ring.path, spec.ring_layout)
        started = time.monotonic()
        self._engine = self._start()
        self.start_seconds = time.monotonic() - started
        self._loop = self._engine.loop
        self._thread = threading.Thread(target=self._run_loop, name="sglang-requests", daemon=True)
        self._thread.start()

    def _start(self) -> Any:
        spec = self.spec
        for name, value in _environment(spec, self.probe_ring.path).items():
            os.environ[name] = value
        try:
            from sglang import Engine

            return Engine(**engine_arguments(spec, self.target.architecture))
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
            "capture": _convention(self.spec, self.target.architecture),
            "layer_ids": list(self.spec.layer_ids),
            "device": self.spec.device,
            "dtype": self.spec.dtype,
            "start_seconds": round(self.start_seconds, 1),
        }

    def submit(self, request: Generate | Teach) -> None:
        """Take a request from any thread; its result goes to the sink."""
        asyncio.run_coroutine_threadsafe(self._answer(request), self._loop)

    def close(self) -> None:
        """End SGLang: afterwards none of its processes is left."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=10)
        signal.signal(signal.SIGQUIT, signal.SIG_IGN)
        # Not SGLang's own end, which kills the resource tracker too.
        kill_descendants()
        self._probe_writer.close()
        self.probe_ring.close()
        self.ring.close()

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

    async def _answer(self, request: Generate | Teach) -> None:
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

    async def _generate(self, request: Generate) -> Generated | Rejected:
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
        return Generated(request.request_id, tuple(output_ids), kind)

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
        reason = self.ring.check(request.slot, torch.tensor(request.token_ids))
        if reason is not None:
            return Rejected(request.sample_id, request.slot, reason)
        return Taught(request.sample_id, request.slot)

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
        reason = self._probe_writer.check(slot, torch.tensor(token_ids))
        rows = self._probe_writer.rows_written(slot)
        entries = answer["meta_info"].get("input_token_logprobs") or []
        logprobs = [float(entry[0]) for entry in entries[-num_logprobs:] if entry[0] is not None]
        return slot, reason, rows, logprobs


ProbeResult = tuple[SlotRef, str | None, int, list[float]]


def engine_arguments(spec: EngineSpec, architecture: str) -> dict[str, Any]:
    """SGLang's own arguments for an engine that captures and does not speculate."""
    context_length = spec.context_length + CONTEXT_MARGIN_TOKENS
    tokens = spec.kv_cache_tokens or spec.max_running_requests * context_length
    arguments: dict[str, Any] = {
        "model_path": spec.target_path,
        "dtype": spec.dtype,
        "device": spec.device,
        "tp_size": spec.tp_size,
        "context_length": context_length,
        "chunked_prefill_size": spec.chunked_prefill_size,
        "max_prefill_tokens": max(spec.chunked_prefill_size, context_length),
        "max_running_requests": spec.max_running_requests,
        "max_total_tokens": tokens,
        "enable_mixed_chunk": spec.mixed_chunk,
        # Only names the convention of the layer ids; SGLang resets it.
        "speculative_algorithm": _convention(spec, architecture),
        "enable_return_aux_hidden_states": True,
        "return_aux_hidden_state_layer_ids": list(spec.layer_ids),
        # A cached prefix would be missing from the capture.
        "disable_radix_cache": True,
        "skip_tokenizer_init": True,
        "sampling_backend": "pytorch",
        "grammar_backend": "none",
        "sleep_on_idle": True,
        "port": spec.port or _free_port(),
        "log_level": "warning",
        "custom_sigquit_handler": note_child_death,
    }
    if spec.device == "cpu":
        arguments["attention_backend"] = "torch_native"
        arguments["disable_overlap_schedule"] = True
        # One process prefills thousands of tokens on a few cores: slow is not stuck.
        arguments["watchdog_timeout"] = 3600
    else:
        arguments["disable_prefill_cuda_graph"] = True
        if spec.attention_backend:
            arguments["attention_backend"] = spec.attention_backend
    return arguments


def _convention(spec: EngineSpec, architecture: str) -> str:
    return capture_convention(architecture) if spec.capture == "auto" else spec.capture


def _environment(spec: EngineSpec, probe_path: str) -> dict[str, str]:
    layout = spec.ring_layout
    capture = CaptureConfig(
        rings={MAIN_RING: spec.ring_path, PROBE_RING: probe_path},
        num_context_features=layout.num_context_features,
        hidden_size=layout.hidden_size,
        dtype=layout.dtype,
        device=spec.device,
    )
    environment = {ENVIRONMENT: capture.to_json(), "TOKENIZERS_PARALLELISM": "false"}
    # The margin may exceed what the target was made for; no sample does.
    environment["SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"] = "1"
    if spec.device == "cpu":
        environment["OMP_NUM_THREADS"] = str(spec.num_threads or len(os.sched_getaffinity(0)))
    return environment


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


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
