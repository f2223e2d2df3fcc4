"""What is measured, and how."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EvalPrompt:
    """One held-out prompt, rendered."""

    prompt_id: str
    domain: str
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class EvaluatorSpec:
    """Everything that an accept length depends on besides the draft."""

    target_path: str
    dtype: str
    prompts: tuple[EvalPrompt, ...]
    eos_token_ids: tuple[int, ...]
    max_new_tokens: int
    batch_size: int
    temperatures: tuple[float, ...]
    """Of a measurement in the loop; the first chooses the best draft."""
    final_temperatures: tuple[float, ...]
    """Of the final report."""
    seed: int
    num_threads: int
    device: str = "cpu"
