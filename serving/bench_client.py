"""SGLang's own benchmark client, where a server answers at an address.

Its accept length is the server's running average since the start, and is not read; accept length
comes from requests of our own (`serving.bench`).
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

MODULE = "sglang.benchmark.serving"
FIGURES = (
    "mean_ttft_ms",
    "median_ttft_ms",
    "mean_tpot_ms",
    "median_tpot_ms",
    "output_throughput",
    "completed",
)


def client_command(
    url: str,
    tokenizer: str,
    output: Path,
    *,
    input_tokens: int,
    output_tokens: int,
    number: int,
    concurrency: int,
    seed: int,
) -> list[str]:
    """The client's command line for random prompts of one length."""
    return [
        sys.executable,
        "-m",
        MODULE,
        "--backend",
        "sglang",
        "--base-url",
        url,
        "--model",
        tokenizer,
        "--dataset-name",
        "random-ids",
        "--random-input-len",
        str(input_tokens),
        "--random-output-len",
        str(output_tokens),
        "--random-range-ratio",
        "1.0",
        "--num-prompts",
        str(number),
        "--max-concurrency",
        str(concurrency),
        "--seed",
        str(seed),
        "--tokenize-prompt",
        "--output-file",
        str(output),
    ]


def read_output(text: str) -> dict[str, Any]:
    """The figures of the client's last line.

    Raises:
        ValueError: there is no line, or it lacks a figure.
    """
    lines = [line for line in text.split("\n") if line.strip()]
    found = json.loads(lines[-1]) if lines else {}
    missing = [name for name in FIGURES if name not in found]
    if missing:
        raise ValueError(
            f"SGLang's benchmark client left out {', '.join(missing)}; allowed: the client of the "
            "supported SGLang; install it"
        )
    return {name: found[name] for name in FIGURES}


def run_client(command: list[str], output: Path, timeout_seconds: float) -> dict[str, Any]:
    """Run the client and read its figures.

    Raises:
        RuntimeError: it failed; shows the end of what it said.
        ValueError: its figures are incomplete.
    """
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=timeout_seconds, check=False
    )
    if result.returncode:
        said = (result.stderr or result.stdout).strip()[-800:]
        raise RuntimeError(f"SGLang's benchmark client failed: {said}")
    return read_output(output.read_text())
