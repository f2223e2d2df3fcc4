"""`splitserve plan`: what a run would do and hold, without starting it."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from splitserve.compose import compose
from splitserve.run.memory import GIB, GpuNeeds, check_memory, num_parameters
from splitserve.run.plan import Plan, make_plan
from splitserve.settings import RunSettings


def plan(arguments: Sequence[str]) -> int:
    """Print the halves, the samples and the memory of every GPU; 0 if the run could begin.

    Raises:
        ValueError: bad input, a GPU that is not there, or more memory needed than there is.
    """
    settings = compose(arguments)
    console = Console()
    found = make_plan(settings, check_fit=False, tell=lambda line: console.print(line, style="dim"))
    for line in plan_lines(settings, found):
        console.print(line, soft_wrap=True, highlight=False)
    if found.memory:
        console.print(memory_table(found.memory))
    check_memory(found.memory)
    return 0


def plan_lines(settings: RunSettings, found: Plan) -> list[str]:
    """The run in sentences."""
    draft, target, layout = found.draft, found.target, settings.layout
    measured = "the engine as it serves" if settings.speculates else "the embedded decoder"
    return [
        f"target {settings.target.name}: {target.architecture}, {target.num_layers} layers, hidden "
        f"size {target.hidden_size}, on {_places(layout.target)}",
        f"draft: {draft.num_hidden_layers} layers, {num_parameters(draft) / 1e6:.1f} M parameters, "
        f"block {draft.block_size}, reads layers {', '.join(map(str, draft.target_layer_ids))}, "
        f"{settings.num_ranks} trainer ranks on {_places(layout.train)}",
        f"{found.schedule.num_samples} samples, {settings.train.steps} steps of "
        f"{settings.train.global_batch_size} samples; {len(found.held_out)} held-out prompts, "
        f"measured by {measured}",
        f"ring: {found.ring_bytes / GIB:.1f} GiB on each of {found.ring_layout.num_shards} "
        f"shards, {found.ring_layout.slot_bytes(1000) / 1000 / 1024:.1f} KiB a token",
    ]


def memory_table(memory: Sequence[GpuNeeds]) -> Table:
    """What every GPU will hold, largest parts first."""
    table = Table(title="memory (GiB)")
    table.add_column("GPU")
    table.add_column("what")
    table.add_column("needed", justify="right")
    for entry in memory:
        table.add_row(
            f"{entry.gpu.name} {entry.gpu.model}",
            " and ".join(entry.roles),
            f"{entry.num_bytes / GIB:.2f} of {entry.gpu.num_bytes / GIB:.1f}",
            style="bold",
        )
        parts = entry.target | entry.train
        for name in sorted(parts, key=lambda n: -parts[n]):
            table.add_row("", name, f"{parts[name] / GIB:.2f}")
    return table


def _places(gpus: Sequence[int]) -> str:
    return f"GPU {', '.join(map(str, gpus))}" if gpus else "the CPU"
