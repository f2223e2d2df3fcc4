"""Typed messages between the coordinator and its worker processes.

Every worker talks to the coordinator only, over one inherited socket pair. A message is a frozen
dataclass; what it needs to be interpreted travels inside it. Token sequences and small numbers
travel here; hidden states never do: they go through the ring, and a `SlotRef` says where.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class SlotRef:
    """A place in the ring, handed out once by the ring's owner."""

    index: int
    """Row of the ring's header table."""
    offset: int
    """Bytes from the start of every shard's payload to the sample's part in it."""
    num_bytes: int
    """Features and target states together, in each shard."""
    generation: int
    """Unique per allocation; the writer stamps it and the reader checks it."""
    num_tokens: int
    """Rows that a complete sample has."""
    ring: int = 0
    """Which engine's ring."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How one response is drawn from the target."""

    temperature: float = 0.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = -1
    """-1 keeps every token."""
    max_new_tokens: int = 96
    seed: int | None = None


# --- any worker -> coordinator -------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Sent at least every few seconds from a thread of its own."""

    state: str
    """What the worker does or waits for, in a few words."""


@dataclass(frozen=True, slots=True)
class Fatal:
    """The worker cannot go on and exits with code 1 after this."""

    message: str
    """The one text that the user is to read."""


# --- coordinator -> any worker -------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Start:
    """First message on the socket: what the role's `run` function is to work with."""

    spec: Any


@dataclass(frozen=True, slots=True)
class Stop:
    """Finish what is in hand, clean up, exit with code 0."""


# --- coordinator <-> engine ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Generate:
    """Draw one response from the target."""

    request_id: str
    token_ids: tuple[int, ...]
    sampling: Sampling


@dataclass(frozen=True, slots=True)
class Teach:
    """Prefill a whole sample and put its states into the slot."""

    sample_id: str
    token_ids: tuple[int, ...]
    slot: SlotRef


@dataclass(frozen=True, slots=True)
class EngineReady:
    """The engine is up and its self-check has passed."""

    info: dict[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Generated:
    """A response; it includes the end-of-turn token where the target produced one."""

    request_id: str
    output_ids: tuple[int, ...]
    finish_reason: str
    """"stop" or "length"."""
    draft_step: int = -1
    """Optimizer steps of the draft that the engine speculated with, -1 without one. The response
    does not depend on it."""


@dataclass(frozen=True, slots=True)
class Taught:
    """Every row of the sample is in its slot and finite."""

    sample_id: str
    slot: SlotRef


@dataclass(frozen=True, slots=True)
class Rejected:
    """A request that gave no usable result."""

    request_id: str
    slot: SlotRef | None
    reason: str
    """"nonfinite", "partial_capture" or "engine_error: ..."."""


# --- coordinator <-> trainer ranks ---------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TrainerReady:
    """The rank has its draft, its optimizer and, on resume, its checkpoint."""

    rank: int
    next_step: int
    """The first optimizer step that it will ask for, from 0."""
    num_parameters: int


@dataclass(frozen=True, slots=True)
class NeedBatch:
    """The rank wants its share of the samples of one optimizer step."""

    rank: int
    step: int


@dataclass(frozen=True, slots=True)
class BatchItem:
    """One sample of a batch, its states waiting in the ring."""

    sample_id: str
    epoch: int
    token_ids: tuple[int, ...]
    supervised: tuple[tuple[int, int], ...]
    """Begin and end of every run of tokens that is learned from, ascending, with gaps between."""
    slot: SlotRef


@dataclass(frozen=True, slots=True)
class Batch:
    """A rank's share of one optimizer step."""

    step: int
    micro_batches: tuple[tuple[BatchItem, ...], ...]
    """What each forward pass takes; as many on every rank, some empty where a share is shorter."""
    last: bool = False
    """No step of the run follows this one."""


@dataclass(frozen=True, slots=True)
class NoBatch:
    """Instead of a batch: save a checkpoint at this step and exit."""

    step: int
    finished: bool = False
    """The run ends here by plan, so the draft is to be measured; False where it was stopped."""


@dataclass(frozen=True, slots=True)
class SlotsFree:
    """The rank has copies of its own and has let go of every slot of that step."""

    rank: int
    step: int


@dataclass(frozen=True, slots=True)
class StepDone:
    """The rank has taken that step, or on a GPU has left it to the device."""

    rank: int
    step: int
    wait_seconds: float
    """Time in which the rank had nothing to train on."""
    step_seconds: float
    """Time from then until the update was done, or on a GPU until all of it was under way."""


@dataclass(frozen=True, slots=True)
class Metrics:
    """Means over the last log interval, from rank 0."""

    step: int
    values: dict[str, Any]


@dataclass(frozen=True, slots=True)
class SnapshotReady:
    """The draft as of that step lies in a folder, in export format."""

    step: int
    path: str


@dataclass(frozen=True, slots=True)
class CheckpointSaved:
    """A complete, resumable checkpoint lies in a folder."""

    step: int
    path: str


@dataclass(frozen=True, slots=True)
class TrainerDone:
    """The rank has finished; it exits with code 0 after this."""

    rank: int
    next_step: int


# --- coordinator <-> evaluator -------------------------------------------------------------------

EVALUATION = "evaluation"
"""The request_id under which an engine rejects an `Evaluate`."""


@dataclass(frozen=True, slots=True)
class EvaluatorReady:
    """The evaluator has its target in memory."""


@dataclass(frozen=True, slots=True)
class Evaluate:
    """Measure the accept length of the draft in that folder."""

    step: int
    draft_path: str
    full: bool
    """True: every temperature of the final report; False: the usual one."""


@dataclass(frozen=True, slots=True)
class UpdateDraft:
    """Speculate with the draft of that step from now on; for engines that do not measure."""

    step: int
    draft_path: str


@dataclass(frozen=True, slots=True)
class DraftUpdated:
    """The engine's draft is that of the step."""

    step: int
    seconds: float
    """In which its requests stood still."""


@dataclass(frozen=True, slots=True)
class Evaluated:
    """One report per temperature, as `dspark.report.AcceptReport.to_dict` gives it."""

    step: int
    report: dict[str, Any]
