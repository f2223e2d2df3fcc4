"""The target wrapper: captured layers, masked slots, and which targets it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from decoder_testing import make_target
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    GraniteConfig,
    GraniteForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from dspark.target_model import TargetModel

SHAPE = {
    "vocab_size": 31,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
}


def test_layer_i_is_captured_as_hidden_states_i_plus_1(tmp_path: Path) -> None:
    target = TargetModel(make_target(tmp_path), (0, 2), torch.float32)
    ids = torch.tensor([[5, 9, 11, 4]])
    mask = torch.ones(4, 4, dtype=torch.bool).tril().unsqueeze(0)
    arguments = (ids, torch.arange(4).unsqueeze(0), mask)
    hidden = target.model(ids, output_hidden_states=True).hidden_states
    states, features = target.forward(*arguments, target.new_cache())
    torch.testing.assert_close(features, torch.cat([hidden[1], hidden[3]], -1))
    torch.testing.assert_close(states, hidden[-1])
    target.capture((1,))
    _, features = target.forward(*arguments, target.new_cache())
    torch.testing.assert_close(features, hidden[2])


def test_masked_slots_and_given_positions_are_honoured(tmp_path: Path) -> None:
    """The cached tokens 5, 9, a hole, 11, then 4: the hole must not be seen nor counted."""
    target = TargetModel(make_target(tmp_path), (0, 2), torch.float32)
    cache = target.new_cache()
    first = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 0, 1]]).bool()
    ids, places = torch.tensor([[5, 9, 30, 11]]), torch.tensor([[0, 1, 2, 2]])
    target.forward(ids, places, first.unsqueeze(0), cache)
    mask = torch.tensor([[[1, 1, 0, 1, 1]]]).bool()
    states, features = target.forward(torch.tensor([[4]]), torch.tensor([[3]]), mask, cache)
    hidden = target.model(torch.tensor([[5, 9, 11, 4]]), output_hidden_states=True).hidden_states
    torch.testing.assert_close(states[:, 0], hidden[-1][:, -1])
    torch.testing.assert_close(features[:, 0], torch.cat([hidden[1], hidden[3]], -1)[:, -1])


def test_a_layer_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"layers \[1, 4\]; allowed: 0 to 3"):
        TargetModel(make_target(tmp_path), (1, 4), torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_full_attention_is_accepted(tmp_path: Path, dtype: torch.dtype) -> None:
    config = Qwen3Config(**SHAPE, sliding_window=8, use_sliding_window=False)
    Qwen3ForCausalLM(config).save_pretrained(tmp_path)
    assert TargetModel(tmp_path, (0,), dtype).layer_ids == (0,)


def models() -> list[Any]:
    window = {"sliding_window": 8}
    gpt2 = GPT2Config(vocab_size=31, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    mixed = Qwen3Config(**SHAPE, **window, use_sliding_window=True, max_window_layers=1)
    return [
        pytest.param(MistralForCausalLM, MistralConfig(**SHAPE, **window), "sliding", id="window"),
        pytest.param(Qwen3ForCausalLM, mixed, "sliding_attention", id="one_window_layer"),
        pytest.param(GPT2LMHeadModel, gpt2, "no list of layers", id="other_module_tree"),
        pytest.param(
            GraniteForCausalLM,
            GraniteConfig(
                **{k: v for k, v in SHAPE.items() if k != "head_dim"}, logits_scaling=8.0
            ),
            "logits differ",
            id="scaled_logits",
        ),
    ]


@pytest.mark.parametrize(("cls", "config", "message"), models())
def test_other_targets_are_refused(tmp_path: Path, cls: Any, config: Any, message: str) -> None:
    cls(config).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=message):
        TargetModel(tmp_path, (), torch.float32)


def test_a_model_that_transformers_lacks_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "bailing_hybrid"}')
    with pytest.raises(ValueError, match=r"bailing_hybrid.*allowed:.*the serving engine") as caught:
        TargetModel(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [("num_hidden_layers", 9, "lacks .* weights"), ("vocab_size", 7, "cannot load")],
)
def test_weights_of_another_config_are_refused(
    tmp_path: Path, field: str, value: int, message: str
) -> None:
    folder = make_target(tmp_path)
    file = Path(folder) / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), field: value}))
    with pytest.raises(ValueError, match=message):
        TargetModel(folder, ())
