"""What a rank measures between two log lines, reduced over ranks once per interval.

Sums stay on the rank's device; the host reads loss and gradient norm once per optimizer step.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


class MetricWindow:
    """Sums over one log interval, kept as tensors until they are asked for.

    `metrics` are the sums that `dspark.objective` gives; every mean is formed here, after the sums
    of all ranks have been added up.
    """

    def __init__(self, block_size: int, world_size: int) -> None:
        self._block_size, self._world_size = block_size, world_size
        self._clear()

    def _clear(self) -> None:
        self._sums: dict[str, torch.Tensor] = {}
        self._loss: torch.Tensor | float = 0.0
        self._num_steps = 0
        self._rate = 0.0
        self._grad_norm = 0.0
        self._step_loss: torch.Tensor | float = 0.0

    def add(self, metrics: dict[str, torch.Tensor], loss: torch.Tensor) -> None:
        """Take the sums of one micro-batch; `loss` is already divided by the window's weight."""
        for name, value in metrics.items():
            value = value.detach().double()
            self._sums[name] = self._sums[name] + value if name in self._sums else value
        self._step_loss = loss.detach().double() / self._world_size + self._step_loss

    def end_step(self, learning_rate: float, grad_norm: Any) -> None:
        """Close one optimizer step."""
        self._rate = learning_rate
        self._grad_norm = self._grad_norm + float(grad_norm or 0.0)
        self._loss = self._loss + self._step_loss
        self._last_loss, self._last_norm = float(self._step_loss), float(grad_norm or 0.0)
        self._step_loss = 0.0
        self._num_steps += 1

    def require_finite(self, step: int, checkpoints: str) -> None:
        """Refuse to go on from a step whose loss or gradient is not a number.

        Raises:
            ValueError: loss or gradient norm of the last step is infinite or NaN.
        """
        if torch.isfinite(torch.tensor([self._last_loss, self._last_norm])).all():
            return
        raise ValueError(
            f"step {step}: loss {self._last_loss} with gradient norm {self._last_norm} is not "
            f"finite; nothing of it was saved. Lower train.learning_rate and go on from the last "
            f"checkpoint in {checkpoints} with resume=true"
        )

    def reduce(self) -> dict[str, Any]:
        """Means over the interval and all ranks; collective. The window starts anew."""
        names = sorted(self._sums)
        assert isinstance(self._loss, torch.Tensor), "a window has at least one step"
        packed = torch.cat([self._sums[name].flatten() for name in names] + [self._loss.view(1)])
        dist.all_reduce(packed)
        packed = packed.cpu()
        sums: dict[str, torch.Tensor] = {}
        offset = 0
        for name in names:
            size = self._sums[name].numel()
            sums[name] = packed[offset : offset + size]
            offset += size
        values = self._means(sums)
        values["loss"] = float(packed[offset]) / max(1, self._num_steps)
        values["learning_rate"] = self._rate
        values["grad_norm"] = float(self._grad_norm) / max(1, self._num_steps)
        self._clear()
        return values

    @staticmethod
    def _means(sums: dict[str, torch.Tensor]) -> dict[str, Any]:
        """Numbers for the log from the window's sums."""

        def ratio(top: str, bottom: str) -> float:
            return float(sums[top]) / max(float(sums[bottom]), 1e-12)

        counts = sums["valid_count"].clamp(min=1.0)
        values: dict[str, Any] = {
            "ce": ratio("ce_sum", "weight_sum"),
            "l1": ratio("l1_sum", "weight_sum"),
            "expected_accept_length": ratio("expected_accept_sum", "block_count"),
            "num_blocks": float(sums["block_count"]),
            "alpha": (sums["alpha_sum"] / counts).tolist(),
            "top1": (sums["hit_sum"] / counts).tolist(),
        }
        if "confidence_sum" in sums:
            values["confidence"] = ratio("confidence_sum", "decay_weight_sum")
            values["confidence_error"] = float(sums["confidence_error_sum"]) / max(
                float(sums["valid_count"].sum()), 1e-12
            )
        return values
