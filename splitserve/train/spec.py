"""What a trainer rank is started with."""

from __future__ import annotations

from dataclasses import dataclass

from dspark.config import DraftConfig
from dspark.objective import ObjectiveConfig
from splitserve.settings import TrainSettings
from splitserve.transport.layout import RingAddress
from splitserve.transport.weights import ExchangeAddress


@dataclass(frozen=True, slots=True)
class TrainerSpec:
    """One rank's share of the run's settings."""

    rank: int
    world_size: int
    master_port: int
    device: str
    num_threads: int
    target_path: str
    """HF folder of the target: its embedding and lm_head are used, frozen."""
    draft: DraftConfig
    objective: ObjectiveConfig
    train: TrainSettings
    row_tokens: int
    """Tokens of a packed row; 0 pads every sequence in a row of its own."""
    warm_start: bool
    """Begin from the target's last layers."""
    seed: int
    eval_every: int
    """Steps between two snapshots for the evaluator; 0 only at start and end."""
    rings: tuple[RingAddress, ...]
    """One for each target engine."""
    checkpoints: str
    """Folder of checkpoints, one folder each."""
    snapshots: str
    """Folder of drafts for the evaluator, one folder each."""
    exchange: ExchangeAddress | None = None
    """Where the weights of every snapshot go first; None leaves them to the folder alone."""
    resume_from: str = ""
    """A checkpoint folder; empty starts anew."""
    collective_timeout_seconds: float = 300.0
