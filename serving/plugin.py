"""What serving adds inside SGLang's processes, and only where the environment asks for it."""

from __future__ import annotations

import os

from serving import hooks_audit, hooks_fold


def register() -> None:
    """Called by the entry point in every process of SGLang. Raises ValueError for bad values."""
    fold, audit = os.environ.get(hooks_fold.ENVIRONMENT), os.environ.get(hooks_audit.ENVIRONMENT)
    if not fold and not audit:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if fold:
        hooks_fold.register(HookRegistry.register, HookType, hooks_fold.parse_parts(fold))
    if audit:
        hooks_audit.register(HookRegistry.register, HookType, audit)
