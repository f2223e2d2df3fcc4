"""Exports in SGLang's own draft class, loaded through its own loader, against ours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from sglang_testing import run_script

from dspark.checkpoint import load_draft, save_draft
from dspark.config import DraftConfig
from dspark.model import DSparkDraft

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}
CASES: dict[str, dict[str, Any]] = {
    "vanilla": {},
    "gated": {"markov_head_type": "gated", "architecture": "LingDSparkModel"},
    "rnn": {"markov_head_type": "rnn", "architecture": "DSparkDraftModel"},
    "bias": {"attention_bias": True, "confidence_head_with_markov": False},
    "llama3": {"rope_parameters": LLAMA3},
    "yarn": {"rope_parameters": YARN},
}
CONTEXT, BLOCK = 19, 4
# Observed: features 5e-7, hidden 2e-6, bias and confidence 5e-7, against values of about 1 to 10.
RTOL, ATOL = 1e-5, 1e-5


def make_config(settings: dict[str, Any]) -> DraftConfig:
    base: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 12,
        "vocab_size": 37,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "max_position_embeddings": 64,
        "block_size": BLOCK,
        "target_layer_ids": (0, 2, 3),
        "num_target_layers": 5,
        "mask_token_id": 2,
        "markov_rank": 6,
    }
    return DraftConfig(**{**base, **settings})


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[dict, dict, DSparkDraft]]:
    """Per case: the inputs, what SGLang made of them, and our draft of the same folder."""
    pytest.importorskip("sglang")
    root = tmp_path_factory.mktemp("exports")
    cases, drafts = {}, {}
    for seed, (name, settings) in enumerate(CASES.items()):
        config = make_config(settings)
        draft = DSparkDraft(config)
        generator = torch.Generator().manual_seed(seed)
        for parameter in draft.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.data = noise * 0.3 if parameter.dim() > 1 else 1.0 + noise * 0.2
        folder = root / name
        save_draft(folder, config, draft.state_dict())
        drafts[name] = load_draft(folder, torch.float32)
        width = config.hidden_size
        cases[str(folder)] = {
            "states": torch.randn(CONTEXT, 3 * width, generator=generator),
            "embeds": torch.randn(BLOCK, width, generator=generator),
            "hidden": torch.randn(BLOCK, width, generator=generator),
            "prev": torch.randint(config.vocab_size, (BLOCK,), generator=generator),
        }
    torch.save(cases, root / "cases.pt")
    script = Path(__file__).with_name("sglang_draft_process.py")
    run_script(script, root / "cases.pt", root / "results.pt")
    found = torch.load(root / "results.pt")
    return {
        name: (cases[str(root / name)], found[str(root / name)], drafts[name]) for name in CASES
    }


def assert_near(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours, theirs.float(), rtol=RTOL, atol=ATOL)


@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_sglang_computes_what_we_trained(
    name: str, results: dict[str, tuple[dict, dict, DSparkDraft]]
) -> None:
    inputs, theirs, draft = results[name]
    assert theirs["class"] == draft.config.architecture
    assert theirs["missing"] == [], "SGLang does not notice a tensor that the export lacks"
    assert theirs["attention"] == ["ENCODER_ONLY"] * 2, "block rows look in both directions"
    assert theirs["block_size"] == BLOCK

    states = inputs["states"].unsqueeze(0)
    assert_near(draft.context_features(states)[0], theirs["features"])

    context = draft.context_kv(states, torch.arange(CONTEXT).unsqueeze(0))
    hidden = draft.forward_blocks(
        inputs["embeds"][None, None],
        torch.tensor([[CONTEXT]]),
        context,
        torch.ones(1, 1, CONTEXT, dtype=torch.bool),
    )
    assert_near(hidden[0, 0], theirs["hidden"])

    rows, prev = inputs["hidden"][None, None], inputs["prev"][None, None]
    features = draft.markov_features(rows, prev)
    assert features is not None and draft.markov_head is not None
    assert_near(draft.markov_head.markov_w2(features)[0, 0], theirs["bias"])
    assert_near(draft.confidence_logits(rows, prev)[0, 0], theirs["confidence"])
