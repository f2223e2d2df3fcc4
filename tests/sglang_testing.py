"""SGLang's global state in a process of a test's own, one rank on the CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parent


def run_script(script: Path, *arguments: Path | str, **variables: str) -> None:
    """Run it, with the project and this folder to import from; its errors are those of the test."""
    imports = [str(TESTS.parent), str(TESTS), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, str(script), *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(imports), **variables},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-4000:]


def publish(folder: Path | str) -> None:
    """Make the server arguments for a target those of this process."""
    from sglang.srt.runtime_context import SpawnRanks
    from sglang.srt.runtime_context import publish as publish_arguments
    from sglang.srt.server_args import ServerArgs

    arguments = ServerArgs(
        model_path=str(folder),
        device="cpu",
        attention_backend="torch_native",
        sampling_backend="pytorch",
        disable_overlap_schedule=True,
    )
    publish_arguments(arguments, role="scheduler", ranks=SpawnRanks(world_rank=0))


def make_groups(rendezvous: Path) -> None:
    """The process groups that SGLang's layers ask for, and the rotation that they import."""
    from sglang.srt.distributed import parallel_state

    from splitserve.engine import rotary_shim

    rotary_shim.install()
    parallel_state.init_distributed_environment(
        world_size=1,
        rank=0,
        local_rank=0,
        backend="gloo",
        distributed_init_method=f"file://{rendezvous}",
    )
    parallel_state.initialize_model_parallel()
