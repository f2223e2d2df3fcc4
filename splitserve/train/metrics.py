"""What a rank measures between two log lines, reduced over ranks once per interval.

Everything stays on the rank's device until then. Only whether a step was finite is read earlier,
from a copy that arrives while the next step runs.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Any

import torch
import torch.distributed as dist

from splitserve.train.streams import HostCopy


class MetricWindow:
    """Sums over one log interval, kept as tensors until they are asked for.

    `metrics` are the sums that `dspark.objective` gives; every mean is formed here, after the sums
    of all ranks have been added up.
    """

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._unread: deque[tuple[int, HostCopy]] = deque()
        self._clear()

    def _clear(self) -> None:
        self._sizes: dict[str, int] = {}
        self._sums: torch.Tensor | None = None
        """float64, every metric's numbers and the loss, in the order of `_sizes`."""
        self._norms: torch.Tensor | None = None
        self._step_loss: torch.Tensor | None = None
        self._num_steps = 0
        self._rate = 0.0

    def add(self, metrics: dict[str, torch.Tensor], loss: torch.Tensor) -> None:
        """Take the sums of one micro-batch; `loss` is already divided by the window's weight."""
        values = {**metrics, "loss": loss / self._world_size}
        self._sizes = {name: value.numel() for name, value in values.items()}
        packed = torch.cat([value.detach().view(-1) for value in values.values()]).double()
        self._sums = packed if self._sums is None else self._sums + packed
        step_loss = packed[-1]
        self._step_loss = step_loss if self._step_loss is None else self._step_loss + step_loss

    def end_step(
        self, step: int, learning_rate: float, grad_norm: torch.Tensor | float | None
    ) -> None:
        """Close one optimizer step."""
        assert self._step_loss is not None, f"step {step} had no micro-batch"
        norm = torch.as_tensor(
            0.0 if grad_norm is None else grad_norm,
            dtype=torch.float64,
            device=self._step_loss.device,
        )
        self._unread.append((step, HostCopy(torch.stack([self._step_loss, norm]))))
        self._norms = norm if self._norms is None else self._norms + norm
        self._rate = learning_rate
        self._step_loss = None
        self._num_steps += 1

    def require_finite(self, checkpoints: str, *, unread: int = 0) -> None:
        """Refuse to go on from a step whose loss or gradient is not a number.

        Args:
            checkpoints: for the message, where to go on from.
            unread: the newest steps that are left for later, so that the host need not wait for
                them.

        Raises:
            ValueError: loss or gradient norm of a step is infinite or NaN.
        """
        while len(self._unread) > unread:
            step, copy = self._unread.popleft()
            loss, norm = copy.wait().tolist()
            # DeepSpeed gives a norm that is not finite as -1.
            if not math.isfinite(loss) or not math.isfinite(norm) or norm < 0.0:
                raise ValueError(
                    f"step {step}: loss {loss} with gradient norm {norm} is not finite; nothing of "
                    "it was saved. Lower train.learning_rate and go on from the last checkpoint in "
                    f"{checkpoints} with resume=true"
                )

    def reduce(self) -> dict[str, Any]:
        """Means over the interval and all ranks; collective. The window starts anew."""
        assert self._sums is not None and self._norms is not None, "a window has at least one step"
        packed = torch.cat([self._sums, self._norms.view(1) / self._world_size])
        dist.all_reduce(packed)
        *parts, norms = packed.cpu().split([*self._sizes.values(), 1])
        sums = dict(zip(self._sizes, parts, strict=True))
        values = self._means(sums)
        values["loss"] = float(sums["loss"]) / self._num_steps
        values["learning_rate"] = self._rate
        values["grad_norm"] = float(norms) / self._num_steps
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
