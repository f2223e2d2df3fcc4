"""What serving adds inside SGLang's processes, and only where the environment asks for it."""

from __future__ import annotations

import os

from serving import hooks_audit, hooks_fold, hooks_kernels


def register() -> None:
    """Called by the entry point in every process of SGLang. Raises ValueError for bad values."""
    fold, kernels, audit = (
        os.environ.get(hooks.ENVIRONMENT) for hooks in (hooks_fold, hooks_kernels, hooks_audit)
    )
    if not fold and not kernels and not audit:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if fold:
        hooks_fold.register(HookRegistry.register, HookType, hooks_fold.parse_parts(fold))
    if kernels:
        parts = hooks_kernels.parse_kernels(kernels)
        hooks_kernels.register(HookRegistry.register, HookType, parts)
    if audit:
        hooks_audit.register(HookRegistry.register, HookType, audit)
