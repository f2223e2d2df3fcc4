"""What is measured, and how."""

from __future__ import annotations

from dataclasses import dataclass

from dspark.report import ALL

DTYPES = ("bfloat16", "float16", "float32")


@dataclass(frozen=True, slots=True)
class EvalPrompt:
    """One held-out prompt, rendered.

    Raises:
        ValueError: it has no tokens, or its domain has the name of the sums over domains.
    """

    prompt_id: str
    domain: str
    token_ids: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.token_ids:
            raise ValueError(f"prompt {self.prompt_id!r} has no tokens; give at least one token")
        if self.domain == ALL:
            raise ValueError(
                f"prompt {self.prompt_id!r}: domain={ALL!r} is not usable; allowed: any other "
                "name, this one is that of the sums over domains; rename it"
            )


@dataclass(frozen=True, slots=True)
class EvaluatorSpec:
    """Everything that an accept length depends on besides the draft.

    Raises:
        ValueError: a field is out of range; names it.
    """

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

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise _refuse("dtype", self.dtype, ", ".join(DTYPES), "choose one")
        for name in ("max_new_tokens", "batch_size", "num_threads"):
            if getattr(self, name) < 1:
                raise _refuse(name, getattr(self, name), "1 or more", f"raise {name}")
        for name in ("temperatures", "final_temperatures"):
            if not all(value >= 0.0 for value in getattr(self, name)):
                raise _refuse(name, getattr(self, name), "0 or more", "0 is greedy")


def _refuse(field: str, value: object, allowed: str, remedy: str) -> ValueError:
    return ValueError(f"eval.{field}={value!r} is not usable; allowed: {allowed}; {remedy}")
