"""Kernels of our own in place of SGLang's, in the steps where they are faster.

    attention   decode and verify attention of few requests (`serving.hooks_attention`)
    linear      matrix products of few rows (`serving.hooks_linear`)
    mlp         the first product of an MLP with its activation (`serving.hooks_linear`)
    markov      a Markov head's products (`serving.hooks_linear`)
    rope        norms, rotation and store of q, k and v at verification (`serving.hooks_rope`)
    norm        a layer's norms inside the products around them (`serving.hooks_norm`)

Each leaves to SGLang what it does not apply to, for good once it has failed, and
says so in the log.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

ENVIRONMENT = "SPLITSERVE_KERNELS"
PARTS = ("attention", "linear", "mlp", "markov", "rope", "norm")
PRODUCTS = ("linear", "mlp", "markov", "norm")
"""They share their choices."""
CHOICES = "SPLITSERVE_LINEAR_CHOICES"
"""Path of a file of what `linear` chose for each shape; unset, every start times."""
LOG_MARK = "kernels: "
"""Every line that these write into SGLang's log has it."""

logger = logging.getLogger("serving.kernels")


class SayOnce:
    """Logs a line when it is given for the first time: hooks are called for every layer."""

    def __init__(self) -> None:
        self._said: set[str] = set()

    def __call__(self, line: str) -> None:
        if line not in self._said:
            self._said.add(line)
            logger.warning("%s%s", LOG_MARK, line)


def parse_kernels(text: str) -> tuple[str, ...]:
    """The kernels named in the environment variable; "all" for all.

    Raises:
        ValueError: an unknown one.
    """
    parts = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    if parts == ("all",):
        return PARTS
    if unknown := [part for part in parts if part not in PARTS]:
        raise ValueError(
            f"{ENVIRONMENT}={text!r} is not usable; allowed: all, or of {', '.join(PARTS)} with "
            f"commas; correct {', '.join(unknown)}"
        )
    return parts


def register(register_hook: Callable[..., None], kind: Any, parts: Iterable[str]) -> None:
    """Hook what the kernels ask for."""
    parts = tuple(parts)
    # Imported where they are asked for: they load Triton.
    if "attention" in parts:
        from serving import hooks_attention

        hooks_attention.register(register_hook, kind)
    if products := [part for part in parts if part in PRODUCTS]:
        from serving import hooks_linear

        hooks_linear.register(register_hook, kind, products)
    if "rope" in parts:
        from serving import hooks_rope

        hooks_rope.register(register_hook, kind)
    for part in parts:
        # Whoever started SGLang looks for it: a step that shows more may come much later.
        logger.warning("%s%s is hooked", LOG_MARK, part)
