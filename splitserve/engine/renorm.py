"""Top-k and top-p of verified distributions where FlashInfer, which SGLang calls, is missing."""

from __future__ import annotations

import importlib.util

import torch

TOP_K = "sglang.srt.speculative.dflash_utils._dflash_top_k_renorm_prob"
TOP_P = "sglang.srt.speculative.dflash_utils._dflash_top_p_renorm_prob"


def is_needed() -> bool:
    """Whether SGLang would look for FlashInfer in vain."""
    return importlib.util.find_spec("flashinfer") is None


def top_k_renorm(probs_NV: torch.Tensor, top_ks_N: torch.Tensor) -> torch.Tensor:
    """Each row's `top_ks_N` likeliest tokens, renormalised; the first of equals counts.

    Does not wait for the device.
    """
    sorted_NV, order_NV = probs_NV.sort(dim=-1, descending=True, stable=True)
    places = torch.arange(probs_NV.shape[-1], device=probs_NV.device)
    return _scatter(sorted_NV, order_NV, places < top_ks_N.view(-1, 1))


def top_p_renorm(probs_NV: torch.Tensor, top_ps_N: torch.Tensor) -> torch.Tensor:
    """Each row's likeliest tokens whose sum first reaches `top_ps_N`, renormalised."""
    sorted_NV, order_NV = probs_NV.sort(dim=-1, descending=True, stable=True)
    before_NV = sorted_NV.cumsum(-1) - sorted_NV
    return _scatter(sorted_NV, order_NV, before_NV < top_ps_N.view(-1, 1))


def _scatter(
    sorted_NV: torch.Tensor, order_NV: torch.Tensor, kept_NV: torch.Tensor
) -> torch.Tensor:
    kept = sorted_NV * kept_NV
    # The first place always stays, or a row could become empty.
    kept[:, 0] = sorted_NV[:, 0]
    kept /= kept.sum(dim=-1, keepdim=True)
    return torch.empty_like(sorted_NV).scatter_(1, order_NV, kept)
