"""From settings to everything a run needs, checked before the first process starts."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dspark.config import DraftConfig
from splitserve.data.mask_token import choose_mask_token
from splitserve.data.prompts import Prompt, read_prompts
from splitserve.data.render import ChatRenderer
from splitserve.data.samples import has_anchor
from splitserve.data.schedule import SampleSchedule
from splitserve.data.split import check_leak, split_prompts
from splitserve.errors import UserError
from splitserve.messages import Sampling
from splitserve.run.feeder import Entry
from splitserve.run.process import port_is_free
from splitserve.settings import RunSettings
from splitserve.target.prepare import TargetInfo, capturable_layers, prepare_target
from splitserve.transport.ring import RingLayout


@dataclass(frozen=True)
class Plan:
    """A run before its first process: target, draft, prompts, samples, schedule."""

    target: TargetInfo
    draft: DraftConfig
    train_prompts: list[Prompt]
    held_out: list[Prompt]
    held_out_ids: list[tuple[int, ...]]
    entries: list[Entry]
    schedule: SampleSchedule
    ring_layout: RingLayout
    max_tokens: int


def load_tokenizer(path: str) -> Any:
    """The target's own tokenizer, from its folder."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path, local_files_only=True)
