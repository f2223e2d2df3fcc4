"""Run by test_norm_layers in a process of its own: SGLang's layers, with norms inside products.

Usage: python norm_process.py RESULTS_FILE, under TRITON_INTERPRET=1; the file gets, as JSON, per
model how far the results are from SGLang's own, and what the hooks did. SGLang keeps its arguments,
its process group and its hooks in global state.

Layers, boundaries, captures and hooks are SGLang's own; attention is a stand-in, and norms run as
torch operations, since SGLang's kernels for both need a GPU.
"""

from __future__ import annotations

import json
import logging
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from sglang_testing import make_groups, publish
from torch import Tensor, nn

ROWS = 7
CAPTURED = [1, 2]
PARTS = ("linear", "mlp", "norm")


class MeanAttention(nn.Module):
    """Every row sees the mean of the rows before it: of queries' shape, and of use for tests."""

    layer_id = 0
    is_cross_attention = False

    def forward(self, q: Tensor, k: Tensor, v: Tensor, batch: Any, **_: Any) -> Tensor:
        count = torch.arange(1, len(v) + 1)[:, None]
        mean = v.float().cumsum(0) / count
        return (mean.repeat(1, q.shape[1] // v.shape[1]) + q.float()).to(q.dtype)


def start(folder: Path) -> None:
    """The global state that SGLang's layers ask for, and hooks on them."""
    from sglang.srt.layers import layernorm
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    from transformers import Qwen3Config

    from serving import hooks_kernels, hooks_linear
    from serving.kernels import linear_choice

    Qwen3Config(architectures=["Qwen3ForCausalLM"]).save_pretrained(folder)
    publish(folder)
    make_groups(folder / "rendezvous")

    def forward_cuda(
        norm: Any, x: Any, residual: Any = None, post: Any = None, quant_linear: Any = None
    ) -> Any:
        return norm.forward_native(x, residual, post)

    layernorm.RMSNorm.forward_cuda = forward_cuda
    hooks_linear.is_on_gpu = lambda x: True
    hooks_linear.is_capturing = lambda: False
    name = "m8n32k32s3w4p2"
    found = SimpleNamespace(name=name, fastest=name, microseconds={}, failed={})
    found.microseconds = {found.name: 1.0, "library": 2.0}
    linear_choice.choose = lambda *_, **__: found
    hooks_kernels.register(HookRegistry.register, HookType, PARTS)
    HookRegistry.apply_hooks()


def make(name: str) -> tuple[Any, Any]:
    """A model with random weights, and a function that runs it."""
    from sglang.srt.layers.layernorm import RMSNorm
    from sglang.srt.model_executor.forward_batch_info import ForwardMode
    from sglang.srt.models.dflash import DFlashDraftModel
    from sglang.srt.models.llama import LlamaModel
    from sglang.srt.models.qwen3 import Qwen3Model
    from transformers import LlamaConfig, Qwen3Config

    sizes = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "vocab_size": 50,
        "max_position_embeddings": 64,
    }
    if name == "llama":
        model: Any = LlamaModel(LlamaConfig(**sizes, attention_bias=True))
    elif name == "draft":
        model = DFlashDraftModel(Qwen3Config(**sizes, dflash_config={"target_layer_ids": [1, 2]}))
    else:
        model = Qwen3Model(Qwen3Config(**sizes))
    generator = torch.Generator().manual_seed(3)
    for parameter in model.parameters():
        size = parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 0.3
        value = torch.randn(parameter.shape, generator=generator) * size
        parameter.copy_(value + (parameter.dim() == 1))
    for layer in model.layers:
        layer.self_attn.attn = MeanAttention()
    for module in model.modules():
        if type(module) is RMSNorm:
            module._forward_method = module.forward_cuda
    if name != "draft":
        model.layers_to_capture = CAPTURED
    embeds = torch.randn(ROWS, 64, generator=generator).bfloat16()

    def run(verify: bool) -> list[Tensor]:
        batch = Batch(ForwardMode.TARGET_VERIFY if verify else ForwardMode.EXTEND)
        positions = torch.arange(ROWS)
        out = model(torch.zeros(ROWS).long(), positions, batch, input_embeds=embeds.clone())
        if name == "draft":
            return [out.hidden_states]
        return [out[0], *out[1]]

    return model, run


class Batch:
    """A batch, as far as layers ask; what they ask for besides is None."""

    def __init__(self, mode: Any) -> None:
        self.forward_mode = mode

    def __getattr__(self, name: str) -> None:
        return None


@torch.no_grad()
def compare(name: str, lines: list[str], kernels: Kernels) -> dict[str, Any]:
    model, run = make(name.partition(" ")[0])
    expected = run(verify=False)
    if "lost" in name:
        # Something between takes a copy, which has no mark.
        inner = model.layers[1].self_attn.forward
        model.layers[1].self_attn.forward = lambda positions, hidden_states, forward_batch: inner(
            positions, hidden_states.clone(), forward_batch
        )
    kernels.broken = "broken" in name
    kernels.counts.clear()
    lines.clear()
    found = run(verify=True)
    errors = [float((a - b).norm() / b.norm()) for a, b in zip(found, expected, strict=True)]
    result = {"errors": errors, "kernels": dict(kernels.counts), "lines": list(lines)}
    kernels.counts.clear()
    run(verify=True)
    return {**result, "kernels_again": dict(kernels.counts)}


class Kernels:
    """Counts launches by what is part of them; the product behind a norm can be made to fail."""

    def __init__(self, launch: Any) -> None:
        self.launch, self.broken = launch, False
        self.counts: dict[str, int] = {}

    def __call__(self, *given: Any) -> Any:
        normed, add = given[-2:]
        if normed is not None and self.broken:
            raise RuntimeError("too many resources")
        kind = "normed" if normed is not None else "add" if add is not None else "plain"
        self.counts[kind] = self.counts.get(kind, 0) + 1
        return self.launch(*given)


def main() -> None:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("serving.kernels").addHandler(handler)
    with tempfile.TemporaryDirectory() as folder:
        start(Path(folder))
        torch.set_default_dtype(torch.bfloat16)
        from serving.kernels import skinny_linear

        kernels = Kernels(skinny_linear._launch)
        skinny_linear._launch = kernels
        # The last two end it for the rest of the process: for some products, and for all.
        cases = ("qwen3", "llama", "draft", "qwen3 broken", "llama lost")
        results = {name: compare(name, lines, kernels) for name in cases}
    Path(sys.argv[1]).write_text(json.dumps(results))


if __name__ == "__main__":
    main()
