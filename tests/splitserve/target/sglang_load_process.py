"""Run by test_random_weights in a process of its own: SGLang's models on folders of random weights.

Usage: python sglang_load_process.py RESULTS_FILE FOLDER...; the file gets, as JSON, per folder the
parameters that loading left unset, the KDA layers, and how many numbers the model and the
checkpoint hold. SGLang keeps its server arguments and its process group in global state.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from sglang_testing import make_groups, publish
from torch import Tensor


def stored(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a checkpoint."""
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - not a dict
                yield name, tensors.get_tensor(name)


@torch.no_grad()
def load(folder: Path) -> dict[str, Any]:
    """What SGLang's model of that folder makes of its checkpoint."""
    from sglang.srt.models.registry import ModelRegistry
    from sglang.srt.utils.hf_transformers_utils import get_config

    config = get_config(str(folder), trust_remote_code=False)
    model_class, _ = ModelRegistry.resolve_model_cls(config.architectures)
    model = model_class(config=config)
    for parameter in model.parameters():
        parameter.fill_(float("nan"))  # What is not loaded shows.
    model.load_weights(stored(folder))
    parameters = dict(model.named_parameters())
    return {
        "class": model_class.__name__,
        "kda_layers": list(getattr(config, "linear_layer_ids", ())),
        "unset": [name for name, p in parameters.items() if p.isnan().any()],
        "float32": sorted(name for name, p in parameters.items() if p.dtype == torch.float32),
        "num_parameters": sum(p.numel() for p in parameters.values()),
        "num_stored": sum(tensor.numel() for _, tensor in stored(folder)),
    }


def main() -> None:
    results_file, *folders = sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder:
        publish(folders[0])
        make_groups(Path(folder) / "rendezvous")
        torch.set_default_dtype(torch.bfloat16)
        results = {}
        for name in folders:
            publish(name)
            results[name] = load(Path(name))
    Path(results_file).write_text(json.dumps(results))


if __name__ == "__main__":
    main()
