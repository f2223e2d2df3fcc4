"""Top-k and top-p of verified distributions where FlashInfer, which SGLang calls, is missing."""

from __future__ import annotations

import importlib.util

import torch

TOP_K = "sglang.srt.speculative.dflash_utils._dflash_top_k_renorm_prob"
TOP_P = "sglang.srt.speculative.dflash_utils._dflash_top_p_renorm_prob"


def is_needed() -> bool:
    """Whether SGLang would look for FlashInfer in vain."""
    return importlib.util.find_spec("flashinfer") is None


FEW = 1024
"""Likeliest tokens that are looked at first: far cheaper than to sort the vocabulary."""


def top_k_renorm(probs_NV: torch.Tensor, top_ks_N: torch.Tensor) -> torch.Tensor:
    """Each row's `top_ks_N` likeliest tokens, renormalised. Waits for the device once.

    Most often the only limited rows are greedy ones, beside others without a limit.
    """
    vocab = probs_NV.shape[-1]
    top_ks = top_ks_N.view(-1, 1)
    limited = top_ks < vocab
    few = min(FEW, vocab)
    several = limited & (top_ks > 1)
    has_several, has_many = torch.stack([several.any(), (several & (top_ks > few)).any()]).tolist()
    if not has_several:
        best = probs_NV.argmax(dim=-1, keepdim=True)
        return torch.where(limited, torch.zeros_like(probs_NV).scatter_(1, best, 1.0), probs_NV)
    values, order = probs_NV.topk(vocab if has_many else few, dim=-1)
    few = values.shape[-1]
    places = torch.arange(few, device=probs_NV.device)
    return torch.where(limited, _scatter(probs_NV, values, order, places < top_ks), probs_NV)


def top_p_renorm(probs_NV: torch.Tensor, top_ps_N: torch.Tensor) -> torch.Tensor:
    """Each row's likeliest tokens whose sum first reaches `top_ps_N`, renormalised.

    Waits for the device once.
    """
    few = min(FEW, probs_NV.shape[-1])
    top_ps = top_ps_N.view(-1, 1)
    limited = top_ps < 1.0
    values, order = probs_NV.topk(few, dim=-1)
    if bool((limited & (values.sum(-1, keepdim=True) < top_ps)).any()):
        values, order = probs_NV.sort(dim=-1, descending=True)
    before = values.cumsum(-1) - values
    return torch.where(limited, _scatter(probs_NV, values, order, before < top_ps), probs_NV)


def _scatter(
    probs_NV: torch.Tensor, values: torch.Tensor, order: torch.Tensor, kept: torch.Tensor
) -> torch.Tensor:
    kept_values = values * kept
    # The first place always stays, or a row could become empty.
    kept_values[:, 0] = values[:, 0]
    kept_values /= kept_values.sum(dim=-1, keepdim=True)
    return torch.zeros_like(probs_NV).scatter_(1, order, kept_values)
