"""The one SGLang release that this code has been run with, and the check for it."""

from __future__ import annotations

import os
from importlib.metadata import PackageNotFoundError, entry_points, version

from splitserve.engine.base import EngineError

SGLANG_VERSION = "0.5.23"
PLUGIN_GROUP = "sglang.srt.plugins"
PLUGIN_NAME = "splitserve"


def check_sglang() -> str:
    """The installed SGLang's version, read without importing it.

    Raises ValueError if it is missing or another release: capture hooks into internals, which move
    with every release.
    """
    try:
        found = version("sglang")
    except PackageNotFoundError:
        found = "not installed"
    if found != SGLANG_VERSION:
        raise ValueError(
            f"sglang is {found}; allowed: {SGLANG_VERSION}; "
            f"pip install sglang=={SGLANG_VERSION}, or set layout.engine=transformers "
            "(slow, for small targets)"
        )
    return found


def check_plugin() -> None:
    """Make sure that SGLang will load the capture plugin in its processes.

    Raises EngineError if this package's entry point is not installed.
    """
    if not any(point.name == PLUGIN_NAME for point in entry_points(group=PLUGIN_GROUP)):
        raise EngineError(
            f"plugin not loaded: the entry point {PLUGIN_NAME!r} of group {PLUGIN_GROUP!r} is not "
            "installed; pip install splitserve again in this environment (pip install -e . in a "
            "checkout)"
        )
    allowed = os.environ.get("SGLANG_PLUGINS")
    if allowed and PLUGIN_NAME not in [name.strip() for name in allowed.split(",")]:
        raise EngineError(
            f"plugin not loaded: SGLANG_PLUGINS={allowed!r} leaves {PLUGIN_NAME!r} out; "
            "add it, or unset the variable"
        )
