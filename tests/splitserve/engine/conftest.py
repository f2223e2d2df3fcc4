"""Tiny targets, and this package's SGLang plugin where the package is not installed."""

from __future__ import annotations

import os
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest
import torch
from engine_testing import HIDDEN_SIZE, LAYER_IDS, NUM_LAYERS, VOCAB_SIZE

from serving.version import require_sglang
from splitserve.engine.plugin_check import PLUGIN_GROUP, PLUGIN_NAME
from splitserve.transport.ring import RingLayout, RingOwner


@pytest.fixture(scope="session")
def sglang_installed() -> str:
    """The version; a missing SGLang fails these tests instead of hiding them."""
    try:
        return require_sglang()
    except ValueError as error:
        pytest.fail(f"these tests run the real SGLang: {error}")


@pytest.fixture(scope="session")
def plugin_installed(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Make the entry point visible to SGLang's processes when run from a bare checkout."""
    if any(point.name == PLUGIN_NAME for point in entry_points(group=PLUGIN_GROUP)):
        return
    root = Path(__file__).parents[3]
    site = tmp_path_factory.mktemp("site")
    info = site / "splitserve-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: splitserve\nVersion: 0\n")
    (info / "entry_points.txt").write_text(
        f"[{PLUGIN_GROUP}]\n{PLUGIN_NAME} = splitserve.engine.plugin:register\n"
    )
    paths = [str(root), str(site)]
    sys.path[:0] = paths
    os.environ["PYTHONPATH"] = os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")])


@pytest.fixture(scope="session")
def tiny_target(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A random Qwen3 folder, weights large enough for peaked distributions."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(7)
    config = Qwen3Config(
        hidden_size=HIDDEN_SIZE,
        intermediate_size=96,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=VOCAB_SIZE,
        max_position_embeddings=256,
        initializer_range=0.2,
        tie_word_embeddings=False,
        eos_token_id=1,
        bos_token_id=0,
        dtype="float32",
    )
    model = Qwen3ForCausalLM(config).float()
    for name, weight in model.named_parameters():
        if "norm" in name:
            # Norms that do nothing would hide a missing one.
            torch.nn.init.uniform_(weight, 0.5, 1.5)
    folder = tmp_path_factory.mktemp("tiny-target")
    model.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def reference(tiny_target: str) -> torch.nn.Module:
    """The same target in transformers, float32."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(tiny_target, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def ring():
    layout = RingLayout(HIDDEN_SIZE * len(LAYER_IDS), HIDDEN_SIZE, "float32")
    owner = RingOwner.create(1 << 22, layout)
    yield owner
    owner.close()
