"""Whether SGLang's processes will load the capture plugin."""

from __future__ import annotations

import os
from importlib.metadata import entry_points

from splitserve.engine.base import EngineError

PLUGIN_GROUP = "sglang.srt.plugins"
PLUGIN_NAME = "splitserve"


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
