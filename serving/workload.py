"""What servers are measured with: random prompts of a length, or real ones from a file."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from serving.measure import Ask

FIRST_RANDOM_TOKEN = 100
"""Below are special and control tokens in most vocabularies."""
_FINAL = re.compile(r"####\s*(-?[\d,]*\.?\d+)")
_NUMBER = re.compile(r"-?\d[\d,]*\.?\d*")


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as token ids."""

    domain: str
    token_ids: tuple[int, ...] = field(repr=False)
    answer: str = ""
    """The right solution, where the data set has one."""


def random_prompts(
    number: int, num_tokens: int, vocab_size: int, seed: int = 0
) -> tuple[Prompt, ...]:
    """Prompts of random tokens, all of one length and no two alike."""
    top = max(FIRST_RANDOM_TOKEN + 1, vocab_size)
    found = []
    for index in range(number):
        rng = random.Random(f"{seed} {index}")
        ids = tuple(rng.randrange(FIRST_RANDOM_TOKEN, top) for _ in range(num_tokens))
        found.append(Prompt("random", ids))
    return tuple(found)


def read_prompts(
    path: Path,
    encode: Callable[[Sequence[dict[str, str]]], Sequence[int]],
    *,
    domains: Iterable[str] = (),
    number: int = 0,
    per_domain: int = 0,
) -> tuple[Prompt, ...]:
    """Prompts from JSON lines with `messages` and optionally `domain` and `answer`.

    Args:
        encode: renders messages with the target's chat template.
        domains: which to take; empty takes all.
        number, per_domain: how many at most; 0 is no limit.

    Raises:
        ValueError: the file cannot be read, a line is not such an object, or none is left.
    """
    wanted, counts = set(domains), dict[str, int]()
    found: list[Prompt] = []
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(
            f"prompts={str(path)!r} cannot be read ({error}); allowed: JSON lines with messages; "
            "check the path"
        ) from error
    for index, line in enumerate(text.split("\n")):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            messages, domain = row["messages"], str(row.get("domain", "all"))
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise ValueError(
                f"{path}:{index + 1} is not usable ({error}); allowed: an object with messages; "
                "correct the line"
            ) from error
        counts[domain] = counts.get(domain, 0) + 1
        if (wanted and domain not in wanted) or 0 < per_domain < counts[domain]:
            continue
        found.append(Prompt(domain, tuple(encode(messages)), str(row.get("answer") or "")))
        if number and len(found) == number:
            break
    if not found:
        raise ValueError(
            f"prompts={str(path)!r} has no prompt of {sorted(wanted) or 'any domain'}; allowed: "
            "JSON lines with messages; name another file or other domains"
        )
    return tuple(found)


def asks(
    prompts: Sequence[Prompt],
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    ignore_eos: bool = False,
    stop_token_ids: Sequence[int] = (),
) -> list[Ask]:
    """One request a prompt."""
    return [
        Ask(p.token_ids, temperature, max_new_tokens, ignore_eos, tuple(stop_token_ids))
        for p in prompts
    ]


def final_number(text: str) -> str | None:
    """The number that a GSM8K solution, or an answer to one, comes down to.

    Behind the last `####` where there is one, else the last number of the text.
    """
    marked = _FINAL.findall(text)
    numbers = marked or _NUMBER.findall(text)
    return _plain(numbers[-1]) if numbers else None


def _plain(number: str) -> str:
    number = number.replace(",", "").rstrip(".")
    if "." in number:
        number = number.rstrip("0").rstrip(".")
    return number


class TargetTokenizer:
    """The target's tokenizer and chat template."""

    def __init__(self, path: str) -> None:
        from transformers import AutoTokenizer

        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
        except Exception as error:
            why = " ".join(str(error).split())[:300]
            raise ValueError(
                f"target={path!r} has no tokenizer that loads ({type(error).__name__}: {why}); "
                "allowed: a Hugging Face model folder or hub name; check the path"
            ) from error

    def encode(self, messages: Sequence[dict[str, str]]) -> Sequence[int]:
        """Messages and the head of the reply."""
        text = self._tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=True
        )
        ids: Sequence[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text without special tokens."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=True))


def eos_token_ids(target_path: str) -> tuple[int, ...]:
    """Tokens that end an answer, from generation_config.json or config.json."""
    for name in ("generation_config.json", "config.json"):
        file = Path(target_path) / name
        if file.is_file():
            value = json.loads(file.read_text()).get("eos_token_id")
            if value is not None:
                return tuple(value) if isinstance(value, list) else (int(value),)
    return ()
