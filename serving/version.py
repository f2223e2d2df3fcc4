"""The one gate for the SGLang version: its interfaces move with every release."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

SUPPORTED = "0.5.23"


def require_sglang() -> str:
    """The installed SGLang's version, without importing it.

    Raises:
        ValueError: SGLang is missing, or is another release than the one supported.
    """
    try:
        found = version("sglang")
    except PackageNotFoundError as error:
        raise ValueError(
            f"sglang is not installed; the target engine needs sglang=={SUPPORTED}: "
            'pip install "splitserve-trainer[sglang]", or choose engine=transformers'
        ) from error
    if found != SUPPORTED:
        raise ValueError(
            f"sglang=={found} is installed; this version works with sglang=={SUPPORTED} only, "
            f"whose capture and loading interfaces it was checked against: "
            f"pip install sglang=={SUPPORTED}"
        )
    return found
