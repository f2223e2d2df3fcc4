"""Parts of a benchmark that run in processes of their own, with their peak memory."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from pathlib import Path

from serving.processes import descendants


def tree_memory(root: int, kind: str = "Pss:") -> int:
    """Bytes held by a process and all below it, by a line of smaps_rollup.

    Pages that several share count once in `Pss:`, those of the page cache not in `Anonymous:`.
    """
    total = 0
    for pid in [root, *descendants(root)]:
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue
        total += sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(kind))
    return total


def run_part(
    module: str, name: str, *arguments: str, kind: str = "Pss:", every_seconds: float = 0.5
) -> dict[str, float]:
    """`python -m module --part name` in a process of its own; its figures and its peak memory.

    `kind` as in `tree_memory`, which is read every so often.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", module, "--part", name, *arguments],
        stdout=subprocess.PIPE,
        text=True,
    )
    peak = 0

    def watch() -> None:
        nonlocal peak
        while process.poll() is None:
            peak = max(peak, tree_memory(process.pid, kind))
            time.sleep(every_seconds)

    watcher = threading.Thread(target=watch)
    watcher.start()
    output, _ = process.communicate()
    watcher.join()
    if process.returncode:
        raise SystemExit(f"part {name} failed with {process.returncode}")
    return {**json.loads(output.splitlines()[-1]), "peak_memory_gb": peak / 1e9}
