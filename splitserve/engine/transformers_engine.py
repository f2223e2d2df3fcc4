"""The target as a plain transformers model: one request at a time, for tests and tiny targets."""

from __future__ import annotations

import queue
import threading
from typing import Any

import torch

from splitserve.engine.base import EngineSpec, Result, ResultSink, make_probe_ring
from splitserve.messages import (
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
from splitserve.target.info import read_target
from splitserve.transport.ring import RingWriter


class TransformersEngine:
    """Answers requests in order, in a thread of its own. Same promises as the SGLang engine.

    Raises ValueError for a target that is incomplete or cannot give the asked layers.
    """

    def __init__(self, spec: EngineSpec, sink: ResultSink) -> None:
        from transformers import AutoModelForCausalLM

        self.spec = spec
        self._sink = sink
        self.target = read_target(spec.target_path, need_tokenizer=False)
        # The last layer's entry in transformers' hidden states is normed already.
        if max(spec.layer_ids) > self.target.num_layers - 2:
            raise ValueError(
                f"draft.target_layer_ids={list(spec.layer_ids)}; allowed: 0 to "
                f"{self.target.num_layers - 2}; remove the last layer"
            )
        self.eos_token_ids = frozenset(spec.eos_token_ids or self.target.eos_token_ids)
        self.ring = RingWriter.attach(spec.ring)
        self.probe_ring = make_probe_ring(spec)
        self._probe_writer = RingWriter.attach(self.probe_ring.address)
        self._model = AutoModelForCausalLM.from_pretrained(
            spec.target_path, dtype=getattr(torch, spec.dtype), local_files_only=True
        )
        self._model.eval().requires_grad_(False).to(spec.device)
        self._requests: queue.Queue[Generate | Teach | None] = queue.Queue()
        self._thread = threading.Thread(target=self._run, name="transformers-engine", daemon=True)
        self._thread.start()

    def info(self) -> dict[str, object]:
        """Names and versions for the run's record."""
        import transformers

        return {
            "engine": "transformers",
            "version": transformers.__version__,
            "architecture": self.target.architecture,
            "layer_ids": list(self.spec.layer_ids),
            "device": self.spec.device,
            "dtype": self.spec.dtype,
        }

    def submit(self, request: Generate | Teach | Evaluate | UpdateDraft) -> None:
        """Queue a request; its result goes to the sink."""
        assert isinstance(request, Generate | Teach), "only an engine that speculates takes drafts"
        self._requests.put(request)

    def close(self) -> None:
        """Finish the request in hand and stop; queued ones get no answer."""
        while not self._requests.empty():
            self._requests.get_nowait()
        self._requests.put(None)
        self._thread.join()
        self._probe_writer.close()
        self.probe_ring.close()
        self.ring.close()

    def probe(
        self, token_ids: tuple[int, ...], num_logprobs: int
    ) -> tuple[SlotRef, str | None, int, list[float]]:
        """Teach one sequence into the private ring, with the model's own log-probabilities."""
        slot = self.probe_ring.allocate(len(token_ids))
        assert slot is not None, "the self-check holds more probes than its ring has room for"
        logits = self._capture(self._probe_writer, slot, token_ids)
        logprobs = torch.log_softmax(logits[-num_logprobs - 1 : -1].float(), dim=-1)
        wanted = torch.tensor(token_ids[-num_logprobs:], device=logprobs.device)[:, None]
        reason = self._probe_writer.check(slot, torch.tensor(token_ids))
        rows = self._probe_writer.rows_written(slot)
        return slot, reason, rows, logprobs.gather(1, wanted)[:, 0].tolist()

    def _run(self) -> None:
        while (request := self._requests.get()) is not None:
            slot = request.slot if isinstance(request, Teach) else None
            name = request.sample_id if isinstance(request, Teach) else request.request_id
            try:
                result: Result = (
                    self._teach(request) if isinstance(request, Teach) else self._generate(request)
                )
            except Exception as error:
                result = Rejected(name, slot, f"engine_error: {type(error).__name__}: {error}")
            self._sink(result)

    def _teach(self, request: Teach) -> Taught | Rejected:
        self._capture(self.ring, request.slot, request.token_ids)
        reason = self.ring.check(request.slot, torch.tensor(request.token_ids))
        if reason is not None:
            return Rejected(request.sample_id, request.slot, reason)
        return Taught(request.sample_id, request.slot)

    @torch.no_grad()
    def _capture(
        self, writer: RingWriter, slot: SlotRef, token_ids: tuple[int, ...]
    ) -> torch.Tensor:
        """Write the states of token_ids [T] into the slot; returns the logits [T, V]."""
        ids = torch.tensor(token_ids, device=self.spec.device)
        output = self._model.model(ids[None], output_hidden_states=True, use_cache=False)
        features = torch.cat([output.hidden_states[i + 1][0] for i in self.spec.layer_ids], dim=-1)
        states = output.last_hidden_state[0]
        writer.write_rows(slot, 0, features, states, ids)
        return self._model.lm_head(states)

    @torch.no_grad()
    def _generate(self, request: Generate) -> Generated:
        sampling = request.sampling
        generator = torch.Generator()
        generator.manual_seed(0 if sampling.seed is None else sampling.seed)
        if sampling.seed is None:
            generator.seed()
        ids = torch.tensor([request.token_ids], device=self.spec.device)
        output_ids: list[int] = []
        cache: Any = None
        while len(output_ids) < sampling.max_new_tokens:
            output = self._model(ids, past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            token = draw_token(output.logits[0, -1].float().cpu(), sampling, generator)
            output_ids.append(token)
            if token in self.eos_token_ids:
                return Generated(request.request_id, tuple(output_ids), "stop")
            ids = torch.tensor([[token]], device=self.spec.device)
        return Generated(request.request_id, tuple(output_ids), "length")


def draw_token(logits: torch.Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """One token of logits [V] (float32) by temperature, then top-k, then top-p."""
    if sampling.temperature == 0.0:
        return int(logits.argmax())
    probabilities = torch.softmax(logits / sampling.temperature, dim=-1)
    ordered, order = probabilities.sort(descending=True)
    if sampling.top_k > 0:
        ordered[sampling.top_k :] = 0.0
    ordered[ordered.cumsum(0) - ordered > sampling.top_p] = 0.0
    return int(order[torch.multinomial(ordered, 1, generator=generator)])
