"""DeepSpeed's optimizer for bfloat16 weights, with fewer passes over the float32 side.

DeepSpeed's own turns every gradient into float32 before it adds it, fills the sums with zeros after
a step, scales them down to the largest norm, and lets the host wait for that norm. Here a window's
first gradients are written over what the sums hold, later ones are added two micro-batches at a
time, the scale is a factor within AdamW, which writes the new weights as well, and the host waits
for nothing. Sums are the same to the last bit, and so are the checkpoints' parts.

On a GPU a parameter's gradient moves 44 bytes in a window of eight micro-batches, not 144, and a
step 34, not 54. The price is 2 bytes a parameter: a gradient that waits for the next one.

Importing this module imports DeepSpeed, which wants to know its accelerator before that.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import Any

import deepspeed
import torch

try:
    from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
    from deepspeed.runtime.utils import all_gather_dp_groups
except ImportError as error:
    raise ValueError(
        f"deepspeed {deepspeed.__version__}: {error}; allowed: versions that have it, such as "
        "0.19.8; install deepspeed==0.19.8"
    ) from error

_USED = (
    "_lazy_init_hp_params_optimizer_state",
    "accumulate_hp_grads_and_remove_lp",
    "allgather_bucket_size",
    "bf16_groups",
    "bf16_groups_flat",
    "bf16_partitioned_groups",
    "clear_hp_grads",
    "clip_grad",
    "fp32_groups_flat_partition",
    "fp32_groups_gradient_flat_partition",
    "fp32_groups_gradients",
    "fp32_groups_gradients_flat",
    "fp32_groups_has_gradients",
    "get_grads_for_reduction",
    "immediate_grad_update",
    "is_gradient_accumulation_boundary",
    "nccl_start_alignment_factor",
    "optimizer",
    "real_dp_process_group",
    "update_lp_params",
)
"""What DeepSpeed's class has in 0.19.8 and the one below builds on."""


def take_over(optimizer: Any) -> None:
    """Make of DeepSpeed's optimizer for bfloat16, with `immediate_grad_update`, the one below.

    Any other is left as it is.

    Raises:
        ValueError: the DeepSpeed that is installed lacks what this builds on.
    """
    if not isinstance(optimizer, BF16_Optimizer):
        return
    lacking = [name for name in _USED if not hasattr(optimizer, name)]
    if lacking:
        raise ValueError(
            f"deepspeed {deepspeed.__version__}: its BF16_Optimizer has no {', '.join(lacking)}; "
            "allowed: versions that do, such as 0.19.8; install deepspeed==0.19.8"
        )
    if not optimizer.immediate_grad_update:
        return
    assert isinstance(optimizer.optimizer, torch.optim.AdamW), type(optimizer.optimizer)
    assert all(not group["amsgrad"] for group in optimizer.param_groups), "AdamW without amsgrad"
    kernels: ModuleType | None = None
    if all(flat.is_cuda for flat in optimizer.bf16_groups_flat):
        # Triton is not on every platform.
        kernels = import_module("splitserve.train.kernels")
    # The engine makes its optimizer itself and of no class but its own. The hooks on the parameters
    # look their method up when they are called.
    optimizer.__class__ = WindowOptimizer
    optimizer.begin(kernels)


class WindowOptimizer(BF16_Optimizer):
    """Sums the gradients of a window's micro-batches and steps, all in the device's order.

    A sum is valid once the window has written it, which `fp32_groups_has_gradients` says; until
    then it holds an earlier window's.
    """

    def begin(self, kernels: ModuleType | None) -> None:
        """Start with no gradient.

        Args:
            kernels: `splitserve.train.kernels`, or None for torch's operations.
        """
        self.kernels = kernels
        self._waiting: dict[tuple[int, int], torch.Tensor] = {}
        """By group and parameter, a gradient whose turn comes with the next one."""
        self._came = False
        self.clear_hp_grads()

    # --- what DeepSpeed calls ---------------------------------------------------------------------

    @torch.no_grad()
    def accumulate_hp_grads_and_remove_lp(
        self, lp_param: torch.nn.Parameter, group_idx: int, param_idx: int
    ) -> None:
        """Take a parameter's gradient, as soon as it is there."""
        place, gradient = (group_idx, param_idx), lp_param.grad
        lp_param.grad = None
        if gradient is None:
            return
        self._came = True
        lp_param._hp_grad = self.fp32_groups_gradients[group_idx][param_idx]
        waiting = self._waiting.pop(place, None)
        if waiting is not None:
            self._add(place, waiting, gradient)
        elif self.is_gradient_accumulation_boundary():
            self._add(place, gradient)
        else:
            self._waiting[place] = gradient

    @torch.no_grad()
    def get_grads_for_reduction(self) -> tuple[list[torch.Tensor], dict[str, list[torch.Tensor]]]:
        """The sums, which DeepSpeed then averages over the ranks."""
        self._complete()
        reduced: tuple[list[torch.Tensor], dict[str, list[torch.Tensor]]]
        reduced = super().get_grads_for_reduction()
        return reduced

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Clip, update masters, moments and weights; nothing of it if the norm is not finite."""
        assert closure is None, "DeepSpeed's engine passes none"
        self._complete()
        norm = _norm(self.fp32_groups_gradients_flat)
        self._global_grad_norm = norm
        factor = torch.ones_like(norm)
        if self.clip_grad > 0.0:
            factor = (self.clip_grad / (norm + 1e-6)).clamp(max=1.0)
        for masters, gradients in zip(
            self.fp32_groups_flat_partition, self.fp32_groups_gradient_flat_partition, strict=True
        ):
            masters.grad = gradients
        if self.kernels is None:
            self._torch_step(factor, norm.isfinite())
        else:
            self._kernel_step(self.kernels, factor, norm.isfinite())
        # Once there is a state to be linked.
        self._lazy_init_hp_params_optimizer_state()
        self.clear_hp_grads()

    def clear_hp_grads(self) -> None:
        """Begin a window; its first gradients are written over what the sums hold."""
        self._waiting.clear()
        self._came = False
        for known in self.fp32_groups_has_gradients:
            known[:] = [False] * len(known)

    # --- sums -------------------------------------------------------------------------------------

    def _add(
        self, place: tuple[int, int], first: torch.Tensor, second: torch.Tensor | None = None
    ) -> None:
        group, index = place
        total, known = self.fp32_groups_gradients[group][index], self.fp32_groups_has_gradients
        first = first.reshape(-1)
        second = None if second is None else second.reshape(-1)
        fresh, known[group][index] = not known[group][index], True
        if self.kernels is not None:
            self.kernels.add_gradients(total, first, second, fresh=fresh)
            return
        if fresh:
            total.copy_(first)
        else:
            total.add_(first)
        if second is not None:
            total.add_(second)

    def _complete(self) -> None:
        """Make every sum the window's."""
        if not self._came:
            raise ValueError(
                f"deepspeed {deepspeed.__version__}: a step without gradients, or one that hands "
                "them over in a way that is not known; install deepspeed==0.19.8"
            )
        for place, gradient in self._waiting.items():
            self._add(place, gradient)
        self._waiting.clear()
        for totals, known in zip(
            self.fp32_groups_gradients, self.fp32_groups_has_gradients, strict=True
        ):
            for index, total in enumerate(totals):
                if not known[index]:
                    total.zero_()
                    # Other ranks may have had gradients, which the exchange puts there.
                    known[index] = True

    # --- the step ---------------------------------------------------------------------------------

    def _torch_step(self, factor: torch.Tensor, finite: torch.Tensor) -> None:
        # As torch's scaler of gradients tells an optimizer.
        self.optimizer.grad_scale = 1.0 / factor
        self.optimizer.found_inf = 1.0 - finite.float()
        self.optimizer.step()
        self.update_lp_params()

    def _kernel_step(self, kernels: ModuleType, factor: torch.Tensor, finite: torch.Tensor) -> None:
        for number, group in enumerate(self.optimizer.param_groups):
            masters = self.fp32_groups_flat_partition[number]
            state = self.optimizer.state[masters]
            if not state:
                # As torch's AdamW has it.
                state["step"] = torch.zeros((), dtype=torch.float32, device=masters.device)
                state["exp_avg"] = torch.zeros_like(masters)
                state["exp_avg_sq"] = torch.zeros_like(masters)
            state["step"] += finite
            betas, rate = group["betas"], group["lr"]
            steps = state["step"].double()
            biases = [1.0 - torch.pow(beta, steps) for beta in betas]
            factors = torch.stack(
                [factor.double(), rate / biases[0], biases[1].rsqrt(), finite.double()]
            )
            own = self.bf16_partitioned_groups[number][
                torch.distributed.get_rank(self.real_dp_process_group[number])
            ]
            kernels.adamw(
                own,
                masters,
                masters.grad,
                state["exp_avg"],
                state["exp_avg_sq"],
                factors.float(),
                decay=rate * group["weight_decay"],
                betas=betas,
                eps=group["eps"],
            )
        # The rest of `update_lp_params`.
        all_gather_dp_groups(
            groups_flat=self.bf16_groups_flat,
            partitioned_param_groups=self.bf16_partitioned_groups,
            dp_process_group=self.real_dp_process_group,
            start_alignment_factor=self.nccl_start_alignment_factor,
            allgather_bucket_size=self.allgather_bucket_size,
        )


def _norm(flat: list[torch.Tensor]) -> torch.Tensor:
    """Of all numbers, float32, on their device."""
    norms = [torch.linalg.vector_norm(part) for part in flat]
    return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))
