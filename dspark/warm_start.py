"""Starting a draft from its target instead of from noise: worth it where training is short."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import safe_open

from dspark.model import DSparkDraft
from dspark.target import FrozenTarget

LAYER_WEIGHTS = (
    "self_attn.q_proj.weight",
    "self_attn.k_proj.weight",
    "self_attn.v_proj.weight",
    "self_attn.o_proj.weight",
    "mlp.gate_proj.weight",
    "mlp.up_proj.weight",
    "mlp.down_proj.weight",
    "input_layernorm.weight",
    "post_attention_layernorm.weight",
)


@torch.no_grad()
def init_from_target(draft: DSparkDraft, folder: str | Path) -> list[str]:
    """Take over what maps from the target's last layers; shapes that differ are left as they are.

    The draft's layers begin as the target's last ones, its final norm as the target's, `fc` as
    the mean of the captured layers under the norm of the last layer's input, and the Markov
    embedding as the leading directions of the token embedding (its output matrix stays zero, so
    the head begins silent).

    Returns:
        Names of the draft's tensors that were set.

    Raises:
        ValueError: the target's last layers have no attention of the draft's kind.
    """
    path = Path(folder)
    config = draft.config
    first = config.num_target_layers - config.num_hidden_layers
    # Context vectors take the place of the last layer's input, so they are normed as that is.
    last = config.num_target_layers - 1
    sources = {
        "norm.weight": "model.norm.weight",
        "hidden_norm.weight": f"model.layers.{last}.input_layernorm.weight",
    }
    for layer in range(config.num_hidden_layers):
        for name in LAYER_WEIGHTS:
            sources[f"layers.{layer}.{name}"] = f"model.layers.{first + layer}.{name}"
    found = dict(_read(path, set(sources.values())))
    if not any(".self_attn." in name for name in found):
        raise ValueError(
            f"draft.warm_start=True, but layers {first} to {last} of {str(path)!r} have no "
            "self_attn.{q,k,v,o}_proj; allowed: false for such a target; set draft.warm_start=false"
        )
    parameters = dict(draft.named_parameters())
    done = []
    for name, source in sources.items():
        value = found.get(source)
        if value is not None and value.shape == parameters[name].shape:
            parameters[name].copy_(value)
            done.append(name)
    num_layers = len(config.target_layer_ids)
    identity = torch.eye(config.hidden_size) / num_layers
    parameters["fc.weight"].copy_(identity.repeat(1, num_layers))
    done.append("fc.weight")
    if draft.markov_head is not None:
        embedding = FrozenTarget.load(path, torch.float32).embedding
        draft.markov_head.markov_w1.weight.copy_(leading_directions(embedding, config.markov_rank))
        done.append("markov_head.markov_w1.weight")
    return done


def _read(folder: Path, names: set[str]) -> Iterator[tuple[str, torch.Tensor]]:
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            for name in names & set(tensors.keys()):
                yield name, tensors.get_tensor(name)


def leading_directions(embedding_VD: torch.Tensor, rank: int) -> torch.Tensor:
    """The embedding's projections on its `rank` strongest directions, unit variance, [V, rank].

    A rank above the embedding's width leaves the columns beyond it at zero.
    """
    centred = embedding_VD.float() - embedding_VD.float().mean(0)
    covariance = centred.t() @ centred / centred.shape[0]
    values, vectors = torch.linalg.eigh(covariance)
    width = min(rank, embedding_VD.shape[1])
    top = vectors.flip(1)[:, :width]
    scale = values.flip(0)[:width].clamp(min=1e-12).rsqrt()
    out = torch.zeros(embedding_VD.shape[0], rank)
    out[:, :width] = (centred @ top) * scale
    return out
