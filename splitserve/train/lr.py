"""The learning rate as a function of the step alone, so that resuming cannot shift it."""

from __future__ import annotations

import math

from splitserve.settings import TrainSettings


def learning_rate(step: int, settings: TrainSettings) -> float:
    """Linear warm-up to the peak, then a cosine down to `min_lr_ratio` of it at the last step.

    Args:
        step: optimizer steps already taken; the rate is that of the next one.
    """
    warmup_steps = max(1, round(settings.warmup_fraction * settings.steps))
    if step < warmup_steps:
        return settings.learning_rate * (step + 1) / warmup_steps
    progress = (step - warmup_steps) / max(1, settings.steps - warmup_steps)
    cosine = 0.5 * (1.0 + math.cos(math.pi * min(1.0, progress)))
    floor = settings.min_lr_ratio
    return settings.learning_rate * (floor + (1.0 - floor) * cosine)
