"""The draft that training begins with."""

from __future__ import annotations

import torch

from dspark.config import DraftConfig
from dspark.model import DSparkDraft
from dspark.warm_start import init_from_target


def initial_draft(config: DraftConfig, seed: int, warm_start_from: str = "") -> DSparkDraft:
    """A new draft, the same in every process that is given the same seed.

    Args:
        warm_start_from: folder of a target whose last layers it begins with; empty = random.

    Raises:
        ValueError: the target's layers do not fit the draft.
    """
    torch.manual_seed(seed)
    draft = DSparkDraft(config)
    if warm_start_from:
        init_from_target(draft, warm_start_from)
    return draft
