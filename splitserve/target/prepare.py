"""Find the target, or make it, before anything starts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from splitserve.target.cache import default_cache_dir
from splitserve.target.hub import local_folder
from splitserve.target.info import TargetInfo, capturable_layers, capture_convention, read_target
from splitserve.target.package import target_from_package

__all__ = [
    "TargetInfo",
    "capturable_layers",
    "capture_convention",
    "default_cache_dir",
    "prepare_target",
    "read_target",
]


def prepare_target(
    *,
    path: str = "",
    random_config: Mapping[str, Any] | None = None,
    random_seed: int = 0,
    package: str = "",
    gguf_member: str = "",
    gguf_sha256: str = "",
    cache_dir: str | Path | None = None,
    need_tokenizer: bool = True,
) -> TargetInfo:
    """Return the target in `path`, or else of `random_config`, or else of a package's GGUF file.

    `cache_dir` is where a made target is kept; by default SPLITSERVE_CACHE, else
    XDG_CACHE_HOME/splitserve, else ~/.cache/splitserve. Raises ValueError for anything that is
    missing or cannot be had; the message names the field and what to do.
    """
    if path:
        return read_target(local_folder(path), need_tokenizer=need_tokenizer)
    cache = Path(cache_dir) if cache_dir else None
    if random_config:
        # Drawing needs torch, which is not to be waited for where a folder is only looked up.
        from splitserve.target.random_weights import random_target

        return read_target(random_target(random_config, random_seed, cache))
    return read_target(target_from_package(package, gguf_member, gguf_sha256, cache))
