"""Run by test_sglang_export in a process of its own: SGLang's draft on an exported folder.

Usage: python sglang_draft_process.py CASES_FILE RESULTS_FILE. CASES_FILE holds a dict of folder to
inputs as `torch.save` writes it; RESULTS_FILE gets one dict of tensors per folder. SGLang keeps its
server arguments, its process group and the kind of verification in global state.

Everything but the attention product is SGLang's own: its attention kernels need a GPU and its
page tables, so one plain product over the context and the block takes their place.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

# Before SGLang is imported: in its "static" mode it builds no confidence head.
os.environ["SGLANG_RAGGED_VERIFY_MODE"] = "compact"

import torch
from safetensors.torch import load_file
from sglang_testing import make_groups, publish
from torch import Tensor, nn


class PlainAttention(nn.Module):
    """Every row sees the context and every row, in place of SGLang's paged attention."""

    def __init__(self, paged: Any) -> None:
        super().__init__()
        self.kind = paged.attn_type.name
        self.heads, self.kv_heads = paged.tp_q_head_num, paged.tp_k_head_num
        self.width, self.scaling = paged.head_dim, paged.scaling
        self.context: tuple[Tensor, Tensor] = (torch.empty(0), torch.empty(0))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, forward_batch: Any) -> Tensor:
        keys = torch.cat([self.context[0], k]).view(-1, self.kv_heads, self.width)
        values = torch.cat([self.context[1], v]).view(-1, self.kv_heads, self.width)
        group = self.heads // self.kv_heads
        rows = q.view(-1, self.heads, self.width)
        out = torch.empty_like(rows)
        for head in range(self.heads):
            scores = rows[:, head] @ keys[:, head // group].T * self.scaling
            out[:, head] = torch.softmax(scores, -1) @ values[:, head // group]
        return out.flatten(1)


@torch.no_grad()
def run(folder: str, inputs: dict[str, Tensor]) -> dict[str, Any]:
    """What SGLang's draft makes of one sequence's context features and one block."""
    from sglang.srt.models.registry import ModelRegistry
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder)
    draft_class, _ = ModelRegistry.resolve_model_cls(config.architectures)
    draft = draft_class(config)
    for parameter in draft.parameters():
        parameter.fill_(float("nan"))  # What is not loaded shows.
    draft.load_weights(iter(load_file(Path(folder) / "model.safetensors").items()))
    missing = [name for name, p in draft.named_parameters() if p.isnan().any()]

    features = draft.project_target_hidden(inputs["states"])
    positions = torch.arange(features.shape[0])
    for layer in draft.layers:
        attention = layer.self_attn
        keys, values = attention.kv_proj_only(features)
        keys = attention.apply_k_rope(positions, attention.apply_k_norm(keys))
        attention.attn = PlainAttention(attention.attn)
        attention.attn.context = (keys, values)
    block = torch.arange(inputs["embeds"].shape[0]) + features.shape[0]
    hidden = draft(
        input_ids=torch.zeros_like(block),
        positions=block,
        forward_batch=SimpleNamespace(),
        input_embeds=inputs["embeds"],
    ).hidden_states

    biases, state = [], None
    rows, tokens = inputs["hidden"].to(inputs["embeds"].dtype), inputs["prev"]
    if hasattr(draft.markov_head, "init_state"):
        state = draft.markov_head.init_state(rows[:1])
    for row in range(rows.shape[0]):
        bias, state = draft.markov_head.step_bias(
            tokens[row : row + 1], hidden_states=rows[row : row + 1], state=state
        )
        biases.append(bias[0])
    # The last drafted token precedes no row of this block.
    drafts = torch.cat([tokens[1:], tokens.new_zeros(1)]).unsqueeze(0)
    _, confidence = draft.confidence_head.predict(
        rows, anchor_tokens=tokens[:1], draft_tokens=drafts, markov_head=draft.markov_head
    )
    return {
        "class": type(draft).__name__,
        "missing": missing,
        "attention": [layer.self_attn.attn.kind for layer in draft.layers],
        "block_size": draft.gamma,
        "features": features,
        "hidden": hidden,
        "bias": torch.stack(biases),
        "confidence": confidence[0],
    }


def main() -> None:
    cases_file, results_file = sys.argv[1:]
    cases = torch.load(cases_file)
    with tempfile.TemporaryDirectory() as folder:
        publish(next(iter(cases)))
        make_groups(Path(folder) / "rendezvous")
        results = {}
        for name, inputs in cases.items():
            torch.set_default_dtype(inputs["embeds"].dtype)
            results[name] = run(name, inputs)
        torch.save(results, results_file)


if __name__ == "__main__":
    main()
