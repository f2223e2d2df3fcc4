"""What SGLang 0.5.23 asks of a DSPARK draft's config.json, checked before a server is started.

SGLang reads several fields in one place only and answers some mistakes with a bad accept length
instead of an error; `sglang/srt/speculative/dspark_components/dspark_config.py` and
`sglang/srt/models/{dspark,dflash}.py` are the source.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dspark.config import language_config

ARCHITECTURES = ("Qwen3DSparkModel", "LingDSparkModel", "DSparkDraftModel")
HEADS = ("vanilla", "gated", "rnn")
LAST_LAYER_CAPTURABLE = frozenset({"BailingMoeV3ForCausalLM"})
"""Targets that give a layer's output after the layer; the others give it as the next one's input,
and never the last one's."""


def contract_problems(
    draft: Mapping[str, Any], target: Mapping[str, Any], context_length: int | None = None
) -> list[str]:
    """Everything in a draft's config.json that SGLang would refuse or misread for that target.

    Args:
        draft, target: the two config.json files.
        context_length: longest sequence that is to be served; the target's own by default.

    Returns:
        One sentence per problem; empty when the draft can be served.
    """
    problems: list[str] = []
    architecture = (target.get("architectures") or [""])[0]
    target = language_config(target)

    def need(good: bool, sentence: str) -> None:
        if not good:
            problems.append(sentence)

    architectures = draft.get("architectures") or [None]
    need(
        architectures[0] in ARCHITECTURES,
        f"architectures is {architectures}; SGLang knows {', '.join(ARCHITECTURES)}",
    )
    rank = draft.get("markov_rank")
    need(
        isinstance(rank, int) and rank > 0,
        f"markov_rank is {rank!r}; DSPARK needs a Markov head of rank 1 or more",
    )
    head = draft.get("markov_head_type")
    need(head in HEADS, f"markov_head_type is {head!r}; SGLang knows {', '.join(HEADS)}")
    block_size = draft.get("block_size")
    need(
        isinstance(block_size, int) and block_size >= 1,
        f"block_size is {block_size!r}; it is the number of drafted tokens, at top level",
    )
    for name in ("hidden_size", "vocab_size"):
        need(
            draft.get(name) == target.get(name),
            f"{name} is {draft.get(name)!r}, the target's is {target.get(name)!r}; they must agree",
        )
    rows = target.get("padded_vocab_size") or target.get("vocab_size") or 0
    mask = draft.get("mask_token_id")
    need(
        isinstance(mask, int) and 0 <= mask < rows,
        f"mask_token_id is {mask!r}; it must be a row of the target's {rows} embeddings",
    )
    problems += _layer_problems(
        draft.get("target_layer_ids"), target.get("num_hidden_layers") or 0, architecture
    )
    longest = context_length or target.get("max_position_embeddings") or 0
    own = draft.get("max_position_embeddings") or 0
    need(
        own >= longest,
        f"max_position_embeddings is {own}; the target is served to {longest} tokens",
    )
    dtype = draft.get("dtype") or draft.get("torch_dtype")
    need(dtype == "bfloat16", f"dtype is {dtype!r}; SGLang would fall back to float16")
    return problems


def _layer_problems(layer_ids: Any, depth: int, architecture: str) -> list[str]:
    if not isinstance(layer_ids, list) or not layer_ids:
        return ["target_layer_ids is missing; SGLang would assume layers of its own choice"]
    if layer_ids != sorted(set(layer_ids)):
        return [f"target_layer_ids is {layer_ids}; SGLang captures ascending, different layers"]
    if layer_ids[0] < 0 or layer_ids[-1] >= depth:
        return [f"target_layer_ids is {layer_ids}; the target has layers 0 to {depth - 1}"]
    if layer_ids[-1] == depth - 1 and architecture not in LAST_LAYER_CAPTURABLE:
        return [
            f"target_layer_ids is {layer_ids}; SGLang cannot capture the last layer of "
            f"{architecture or 'this target'}"
        ]
    return []
