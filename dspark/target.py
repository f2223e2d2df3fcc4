"""The two tensors of the target that the draft shares: embedding and lm_head, frozen."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from dspark.config import language_config

EMBEDDING_NAMES = (
    "model.embed_tokens.weight",
    "model.word_embeddings.weight",
    "model.language_model.embed_tokens.weight",
    "language_model.model.embed_tokens.weight",
    "transformer.wte.weight",
)
FINAL_NORM_NAMES = ("model.norm.weight", "model.language_model.norm.weight")
LM_HEAD_NAMES = ("lm_head.weight", "language_model.lm_head.weight")


@dataclass(frozen=True)
class FrozenTarget:
    """What of the target enters the draft's forward pass and its loss."""

    embedding: torch.Tensor
    """[V, D]."""
    lm_head: torch.Tensor
    """[V, D]; the same tensor as `embedding` where the target ties them."""
    config: dict[str, Any]
    final_norm: torch.Tensor | None = None
    """[D], the weight of the norm that the target states have passed; None under an unknown
    name."""

    @classmethod
    def load(cls, folder: str | Path, dtype: torch.dtype, device: str = "cpu") -> FrozenTarget:
        """Read both from a Hugging Face folder without loading the rest of the model.

        Raises:
            ValueError: no embedding under a known name, or no lm_head in a target that does not
                tie it to the embedding.
        """
        path = Path(folder)
        config = json.loads((path / "config.json").read_text())
        embedding_name, head_name = shared_names(path, config, _names(path))
        embedding = read_tensor(path, [embedding_name])
        assert embedding is not None, embedding_name
        embedding = embedding.to(device=device, dtype=dtype)
        head = None if head_name == embedding_name else read_tensor(path, [head_name])
        lm_head = embedding if head is None else head.to(device=device, dtype=dtype)
        norm = read_tensor(path, FINAL_NORM_NAMES)
        norm = None if norm is None else norm.to(device=device, dtype=dtype)
        return cls(embedding, lm_head, config, norm)

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding."""
        return self.embedding.shape[0]


def shared_names(
    folder: Path, config: Mapping[str, Any], names: Collection[str]
) -> tuple[str, str]:
    """Which of a target's tensors are its embedding and its lm_head; one name where they are tied.

    Args:
        folder: for the message.
        config: the config.json.
        names: of the target's tensors.

    Raises:
        ValueError: no embedding under a known name, or no lm_head in a target that does not tie it
            to the embedding.
    """
    embedding = next((name for name in EMBEDDING_NAMES if name in names), None)
    if embedding is None:
        raise ValueError(
            f"target.path={str(folder)!r} has no token embedding; allowed: one of "
            f"{', '.join(EMBEDDING_NAMES)}; use a decoder language model"
        )
    if ties_embeddings(config):
        return embedding, embedding
    head = next((name for name in LM_HEAD_NAMES if name in names), None)
    if head is None:
        raise ValueError(
            f"target.path={str(folder)!r} has no lm_head and does not tie it to the embedding; "
            f"allowed: one of {', '.join(LM_HEAD_NAMES)}; complete the folder"
        )
    return embedding, head


def ties_embeddings(config: Mapping[str, Any]) -> bool:
    """Whether a target's lm_head is its embedding, by its config.json, merged or as it is."""
    return bool(language_config(config).get("tie_word_embeddings", False))


def _names(folder: Path) -> set[str]:
    found: set[str] = set()
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="pt") as tensors:
            found |= set(tensors.keys())
    return found


def read_tensor(folder: Path, names: Iterable[str]) -> torch.Tensor | None:
    """The first of these tensors in the folder's safetensors files; None if none is there."""
    wanted = list(names)
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            keys = set(tensors.keys())
            for name in wanted:
                if name in keys:
                    return tensors.get_tensor(name)
    return None
