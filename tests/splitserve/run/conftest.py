"""A tiny target with prompts, and whole runs on it with the transformers engine."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from chat_tokenizer import build_tokenizer
from run_testing import Run
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
