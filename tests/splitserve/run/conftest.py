"""A tiny target with prompts, and whole runs on it with the transformers engine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
from chat_tokenizer import build_tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

NUM_PROMPTS = 24
RECIPE = """
defaults:
  - run_schema
  - target: local
  - draft: dspark_small
  - objective: dspark
  - engine: transformers
  - layout: cpu
  - tracker: none
  - _self_
target: {{path: {target}, dtype: float32}}
data:
  prompts: {prompts}
  held_out_fraction: 0.2
  max_tokens: 48
  sampling: [{{temperature: 0.0, max_new_tokens: 12}}, {{temperature: 1.0, max_new_tokens: 12}}]
draft: {{num_layers: 1, block_size: 3, markov_rank: 8, num_context_layers: 2}}
train:
  {{steps: 4, dtype: float32, global_batch_size: 4, micro_batch_size: 1, num_anchors: 4,
   learning_rate: 1.0e-3, log_every: 1, save_every: 2, keep_checkpoints: 9}}
eval: {{every: 2, max_new_tokens: 8, batch_size: 8}}
layout: {{ring_bytes: 4194304, train_ranks: 1, eval_threads: 1}}
"""


@pytest.fixture(scope="session")
def tiny_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random 4-layer Llama with a real tokenizer and chat template."""
    folder = tmp_path_factory.mktemp("target")
    tokenizer = build_tokenizer()
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer) + 6,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_recipe(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recipe of one's own on that target."""
    folder = tmp_path_factory.mktemp("recipe")
    prompts = folder / "prompts.jsonl"
    rows = [
        {
            "id": f"p{i}",
            "domain": ("sums", "words")[i % 2],
            "messages": [{"role": "user", "content": f"What is {i} plus two?"}],
        }
        for i in range(NUM_PROMPTS)
    ]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = folder / "tiny.yaml"
    recipe.write_text(RECIPE.format(target=tiny_target, prompts=prompts))
    return recipe


class Run:
    """`splitserve train` as its own process, with everything it starts in view."""

    def __init__(self, recipe: Path, folder: Path, overrides: Sequence[str]) -> None:
        self.folder = folder
        command = [sys.executable, "-m", "splitserve.cli", "train", f"recipe={recipe}"]
        self.process = subprocess.Popen(
            [*command, f"run_dir={folder}", *overrides],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])},
            cwd=folder.parent,
        )

    def children(self) -> dict[str, int]:
        """Living workers of this run by role: the processes that it is the parent of.

        Trainers are numbered in the order in which they were started.
        """
        found: dict[str, int] = {}
        for process in sorted(Path("/proc").iterdir(), key=lambda p: (len(p.name), p.name)):
            if not process.name.isdigit() or _parent_of(process) != self.process.pid:
                continue
            command = _command_of(process)
            if "splitserve.worker" in command:
                role = command[command.index("splitserve.worker") + 1]
                ranks = sum(name.startswith("trainer") for name in found)
                found[f"trainer-{ranks}" if role == "trainer" else role] = int(process.name)
        return found

    def wait_for(self, text: str, file: str = "metrics.jsonl", seconds: float = 120.0) -> None:
        """Until `text` stands in a file of the run folder."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            path = self.folder / file
            if path.exists() and text in path.read_text():
                return
            if self.process.poll() is not None:
                pytest.fail(f"the run ended early:\n{self.process.stdout.read()}")
            time.sleep(0.05)
        pytest.fail(f"{text!r} did not appear in {file} within {seconds} s")

    def end(self, seconds: float = 180.0) -> tuple[int, str]:
        """Exit code and everything printed; fails when the run hangs."""
        try:
            output, _ = self.process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            pytest.fail(f"the run did not end within {seconds} s")
        return self.process.returncode, output

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()


def _parent_of(process: Path) -> int:
    try:
        return int((process / "stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, ValueError, IndexError):
        return -1


def _command_of(process: Path) -> list[str]:
    try:
        return (process / "cmdline").read_text().split("\0")
    except OSError:
        return []


@pytest.fixture
def start_run(tiny_recipe: Path, tmp_path: Path) -> Iterator[Callable[..., Run]]:
    """Start a run in a folder of its own; whatever is left at the end is killed."""
    runs: list[Run] = []

    def start(name: str, *overrides: str) -> Run:
        runs.append(Run(tiny_recipe, tmp_path / name, overrides))
        return runs[-1]

    yield start
    for run in runs:
        run.kill()
