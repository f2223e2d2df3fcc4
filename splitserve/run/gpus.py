"""Which GPUs the halves run on, by the names that CUDA_VISIBLE_DEVICES has for them.

The layout counts GPUs among those that this process may see. A worker is given only those that it
needs, so the same GPU has another number in every process; its name stays.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from splitserve.errors import UserError
from splitserve.settings import LayoutSettings

VISIBLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU of this machine."""

    name: str
    """As CUDA_VISIBLE_DEVICES has it."""
    model: str
    num_bytes: int
    """All of its memory."""


@dataclass(frozen=True, slots=True)
class Placement:
    """The GPUs of both halves; empty on the CPU."""

    target: tuple[Gpu, ...] = ()
    train: tuple[Gpu, ...] = ()
    num_engines: int = 1

    @property
    def target_names(self) -> tuple[str, ...]:
        """Every GPU of the target half, engine by engine."""
        return tuple(gpu.name for gpu in self.target)

    @property
    def tp_size(self) -> int:
        """GPUs of each engine; 1 on the CPU."""
        return max(1, len(self.target) // self.num_engines)

    @property
    def groups(self) -> tuple[tuple[str, ...], ...]:
        """The GPUs of each engine; empty groups on the CPU."""
        size, names = self.tp_size, self.target_names
        return tuple(names[n * size : (n + 1) * size] for n in range(self.num_engines))

    def engine_environment(self, number: int) -> dict[str, str]:
        """What an engine may see: its own GPUs, then the one where new drafts lie."""
        return _visible((*self.groups[number], *self.target_names[:1]))

    def trainer_environment(self, rank: int) -> dict[str, str]:
        """What a trainer rank may see: its own GPU first, then those that it reads from."""
        return _visible((self.train[rank].name, *self.target_names)) if self.train else {}


def _visible(names: Sequence[str]) -> dict[str, str]:
    return {VISIBLE: ",".join(dict.fromkeys(names))} if names else {}


def place(layout: LayoutSettings, machine: Sequence[Gpu] | None = None) -> Placement:
    """Find the layout's GPUs on this machine.

    Args:
        machine: the GPUs there are; None asks torch.

    Raises:
        UserError: the layout names a GPU that is not there.
    """
    if not layout.on_gpu:
        return Placement(num_engines=layout.engines)
    gpus = list(visible_gpus() if machine is None else machine)
    for field in ("target", "train"):
        wanted = getattr(layout, field)
        if missing := [number for number in wanted if number >= len(gpus)]:
            raise UserError(
                f"layout.{field}",
                wanted,
                f"0 to {len(gpus) - 1}" if gpus else "none: torch sees no GPU here",
                f"take a layout without GPU {missing[0]} (layout=gpu1 needs one GPU)"
                if gpus
                else "run where torch.cuda.is_available() is true, or with layout=cpu",
            )
    return Placement(
        tuple(gpus[number] for number in layout.target),
        tuple(gpus[number] for number in layout.train),
        layout.engines,
    )


def used_gigabytes(layout: LayoutSettings) -> dict[str, float]:
    """What all processes together have taken of each GPU of the layout, by its number."""
    if not layout.on_gpu:
        return {}
    import torch

    found = {}
    for number in sorted({*layout.target, *layout.train}):
        free, total = torch.cuda.mem_get_info(number)
        found[f"gpu_{number}_used_gb"] = (total - free) / 1e9
    return found


def visible_gpus() -> list[Gpu]:
    """The GPUs that this process may use, in order; empty where torch has none."""
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    text = os.environ.get(VISIBLE, "")
    names = [name.strip() for name in text.split(",") if name.strip()][:count]
    names = names or [str(number) for number in range(count)]
    found = []
    for number, name in enumerate(names):
        properties = torch.cuda.get_device_properties(number)
        found.append(Gpu(name, properties.name, properties.total_memory))
    return found
