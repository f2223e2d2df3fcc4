"""Whether a target's weights are all there and fit its config.json; no tensor is loaded."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from pathlib import Path

from dspark.target import EMBEDDING_NAMES, LM_HEAD_NAMES, shared_names, ties_embeddings
from serving.facts import weight_entries
from splitserve.target.info import TargetInfo, load_json, missing

Entries = Mapping[str, tuple[str, tuple[int, ...]]]
"""Type and shape of every tensor by its name."""

_LAYERS_BESIDE = {
    "model.embed_tokens.weight": "model.layers.",
    "model.word_embeddings.weight": "model.layers.",
    "model.language_model.embed_tokens.weight": "model.language_model.layers.",
    "language_model.model.embed_tokens.weight": "language_model.model.layers.",
    "transformer.wte.weight": "transformer.h.",
}
"""Where the layers are, by the name of the embedding."""
_UNIFORM = frozenset(
    {"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"}
)
"""Architectures all of whose layers have tensors of the same names."""
_DENSE_TYPES = ("F64", "F32", "F16", "BF16")
"""Others may be packed, and have another shape."""
_SHOWN = 5


def check_weights(target: TargetInfo) -> None:
    """Refuse a target whose weights are not all there or are of another model.

    Only what can be told for certain: nothing is said of tensors under names that are not known
    here, or of packed ones.

    Raises:
        ValueError: a file is missing that the index names, is cut off, or holds something else;
            layers are missing; embedding or lm_head is not of the size in the config.json.
    """
    folder = Path(target.path)
    entries = _entries(folder)
    embedding = next((name for name in EMBEDDING_NAMES if name in entries), None)
    if embedding is not None:
        _check_layers(target, folder, entries, _LAYERS_BESIDE[embedding])
        _check_shape(target, folder, entries, embedding)
    if not ties_embeddings(target.config):
        for name in LM_HEAD_NAMES:
            _check_shape(target, folder, entries, name)


def check_shared(target: TargetInfo) -> None:
    """Refuse a target whose embedding and lm_head the draft cannot share.

    Raises:
        ValueError: they are not there under a known name.
    """
    folder = Path(target.path)
    shared_names(folder, target.config, _entries(folder))


def _entries(folder: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    names = {file.name for file in folder.glob("*.safetensors")}
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        places = load_json(index).get("weight_map")
        names |= set(map(str, places.values())) if isinstance(places, dict) else set()
    found: dict[str, tuple[str, tuple[int, ...]]] = {}
    for name in sorted(names):
        try:
            found |= weight_entries(folder / name)
        except ValueError as error:
            raise missing(
                folder, f"has a {name} that cannot be read ({error})", "whole safetensors files"
            ) from error
    return found


def _check_layers(target: TargetInfo, folder: Path, names: Collection[str], prefix: str) -> None:
    layers: dict[int, set[str]] = {}
    for name in names:
        number, dot, rest = name.removeprefix(prefix).partition(".")
        if name.startswith(prefix) and dot and number.isdecimal():
            layers.setdefault(int(number), set()).add(rest)
    if not layers and any(re.search(r"\.\d+\.", name) for name in names):
        # They have other names.
        return
    wanted = range(target.num_layers)
    if lacking := [layer for layer in wanted if layer not in layers]:
        raise missing(
            folder,
            f"has no weights for {_listed('layer', lacking)}, and its config.json names "
            f"num_hidden_layers={target.num_layers}",
            f"weights of layers 0 to {target.num_layers - 1}",
        )
    if target.architecture in _UNIFORM and "quantization_config" not in target.config:
        every = set().union(*(layers[layer] for layer in wanted))
        for layer in wanted:
            gone = sorted(x for x in every - layers[layer] if not x.endswith("inv_freq"))
            if gone:
                raise missing(
                    folder,
                    f"has no {prefix}{layer}.{gone[0]}, which other layers have"
                    + f" ({len(gone)} such tensors)" * (len(gone) > 1),
                    "whole layers",
                )


def _check_shape(target: TargetInfo, folder: Path, entries: Entries, name: str) -> None:
    dtype, shape = entries.get(name, ("", ()))
    if dtype not in _DENSE_TYPES:
        return
    rows = {target.vocab_size, target.config.get("padded_vocab_size", target.vocab_size)}
    if len(shape) != 2 or shape[0] not in rows or shape[1] != target.hidden_size:
        wanted = f"vocab_size={target.vocab_size} rows of hidden_size={target.hidden_size}"
        raise missing(
            folder,
            f"has a {name} of shape {list(shape)}, and its config.json names {wanted}",
            wanted,
        )


def _listed(what: str, numbers: list[int]) -> str:
    shown = ", ".join(map(str, numbers[:_SHOWN])) + " ..." * (len(numbers) > _SHOWN)
    return f"{what}{'s' * (len(numbers) > 1)} {shown}"
