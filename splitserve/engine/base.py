"""What every target engine is given and what it promises."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from splitserve.errors import WorkerError
from splitserve.eval.spec import EvaluatorSpec
from splitserve.messages import (
    DraftUpdated,
    Evaluate,
    Evaluated,
    Generate,
    Generated,
    Rejected,
    Taught,
    Teach,
    UpdateDraft,
)
from splitserve.transport.layout import RingAddress
from splitserve.transport.ring import RingOwner

if TYPE_CHECKING:
    from splitserve.transport.weights import ExchangeAddress

Result = Generated | Taught | Rejected | Evaluated | DraftUpdated


class EngineError(WorkerError):
    """The engine cannot go on; the message is for the user."""


SPARE_TOKENS = 64
"""Of an engine's context beyond the longest request: SGLang keeps some back."""


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """Everything that an engine process works with. Raises ValueError for impossible values."""

    target_path: str
    """Hugging Face folder of the target."""
    layer_ids: tuple[int, ...]
    """Captured decoder layers, ascending; id i is the output of layer i."""
    ring: RingAddress
    kind: str = "sglang"
    """"sglang" or "transformers"."""
    dtype: str = "bfloat16"
    device: str = "cpu"
    eos_token_ids: tuple[int, ...] = ()
    """Tokens that end a response; empty = what the target's own files say."""
    capture: str = "auto"
    """SGLang's capture convention: "DSPARK", "DFLASH", or "auto" by architecture."""
    context_length: int = 1024
    """Longest prompt and response together, tokens."""
    chunked_prefill_size: int = 2048
    """Tokens of one forward pass of a prefill."""
    max_running_requests: int = 64
    prefill_together: int = 1
    """Prompts prefilled at once; fewer wait for a few decode steps (SGLang)."""
    kv_cache_tokens: int = 0
    """Tokens of KV cache; 0 = enough for every running request at the context length."""
    tp_size: int = 1
    num_threads: int = 0
    """CPU threads of each rank; 0 = all cores."""
    port: int = 0
    """Base port of SGLang; 0 = SGLang chooses."""
    attention_backend: str = ""
    """SGLang attention backend on an accelerator; empty = its default."""
    memory_fraction: float = 0.0
    """Share of each GPU's memory for weights and KV cache; 0 = SGLang's own rule."""
    cuda_graph_batch_sizes: tuple[int, ...] = ()
    """Requests per decode step that a CUDA graph is captured for; empty = a few up to
    max_running_requests."""
    draft_path: str = ""
    """Export folder of the draft that the engine begins to speculate with; empty = it only
    captures."""
    draft_step: int = 0
    """Of the draft at `draft_path`."""
    exchange: ExchangeAddress | None = None
    """Where the trainers leave newer weights of that draft."""
    evaluation: EvaluatorSpec | None = None
    """What an engine that speculates measures when it is asked to."""
    mixed_chunk: bool = False
    """Let prefill chunks and decode steps share forward passes."""
    log_file: str = ""
    """Where SGLang's output goes; empty = where the engine's own goes."""
    selfcheck: bool = True
    selfcheck_tolerance: float = 0.0
    """Mean absolute difference of log-probabilities allowed; 0 = by dtype."""
    start_timeout_seconds: float = 600.0

    def __post_init__(self) -> None:
        choices = {
            "kind": ("sglang", "transformers"),
            "dtype": ("bfloat16", "float32"),
            "device": ("cpu", "cuda"),
            "capture": ("auto", "DSPARK", "DFLASH"),
        }
        for name, allowed in choices.items():
            value = getattr(self, name)
            _require(value in allowed, name, value, ", ".join(allowed))
        _require(
            bool(self.layer_ids) and list(self.layer_ids) == sorted(set(self.layer_ids)),
            "target_layer_ids",
            list(self.layer_ids),
            "one or more different layers in ascending order",
        )
        for name in ("context_length", "chunked_prefill_size", "max_running_requests", "tp_size"):
            _require(getattr(self, name) >= 1, name, getattr(self, name), "1 or more")
        layout = self.ring.layout
        width = layout.hidden_size * len(self.layer_ids)
        _require(
            layout.num_context_features == width,
            "ring.layout.num_context_features",
            layout.num_context_features,
            f"{width}, captured layers times hidden size",
        )


def _require(good: bool, field: str, value: object, allowed: str) -> None:
    if not good:
        raise ValueError(f"{field}={value!r}; allowed: {allowed}; correct the setting")


def make_probe_ring(spec: EngineSpec) -> RingOwner:
    """A small private ring on the host, as wide as the run's, for the self-check's samples."""
    layout = replace(spec.ring.layout, num_shards=1)
    return RingOwner.create(4 * layout.slot_bytes(spec.context_length), layout)


class TargetEngine(Protocol):
    """A running target. Results arrive through the callback given at its making, in any order."""

    def info(self) -> dict[str, object]:
        """What the coordinator records about the engine (names, versions, layers)."""

    def submit(self, request: Generate | Teach | Evaluate | UpdateDraft) -> None:
        """Take a request; never blocks. Exactly one result follows. Only an engine that speculates
        takes drafts."""

    def close(self) -> None:
        """Stop, and leave no process and no thread behind."""


ResultSink = Callable[[Result], None]
