"""Targets whose weights are not all there, or are of another model than their config.json."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from dspark.target import FrozenTarget
from splitserve.target.info import TargetInfo, read_target
from splitserve.target.weights import check_shared, check_weights

HIDDEN, VOCAB, LAYERS = 4, 10, 3
Tensors = dict[str, torch.Tensor]


def info(folder: Path, **config: Any) -> TargetInfo:
    return TargetInfo(
        path=str(folder),
        config={"num_hidden_layers": LAYERS, **config},
        architecture="Qwen3ForCausalLM",
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        vocab_size=VOCAB,
        eos_token_ids=(2,),
        tokenizer_len=VOCAB,
        has_chat_template=True,
        dtype="bfloat16",
    )


def model(prefix: str = "model.", head: str = "lm_head.weight") -> Tensors:
    tensors = {
        f"{prefix}embed_tokens.weight": torch.zeros(VOCAB, HIDDEN),
        f"{prefix}norm.weight": torch.zeros(HIDDEN),
        head: torch.zeros(VOCAB, HIDDEN),
    }
    for layer in range(LAYERS):
        for name in ("self_attn.q_proj", "mlp.up_proj"):
            tensors[f"{prefix}layers.{layer}.{name}.weight"] = torch.zeros(HIDDEN, HIDDEN)
    return tensors


def without(*names: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {
        name: value
        for name, value in tensors.items()
        if not any(f".{gone}." in f".{name}." for gone in names)
    }


def with_shape(name: str, *shape: int) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {**tensors, name: torch.zeros(*shape)}


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda whole: b"", "requires a buffer of 8 bytes"),
        (lambda whole: whole[:4], "requires a buffer of 8 bytes"),
        (lambda whole: whole[:40], "Unterminated|Expecting|delimiter"),
        (lambda whole: whole[:-1], "cut off: it has"),
        (lambda whole: b"version https://git-lfs.github.com/spec/v1\n", "Git LFS"),
        (lambda whole: b"\x02" + b"\0" * 7 + b"[]", "does not list tensors"),
        (lambda whole: b"\xff" * 64, "cannot be read"),
        (None, "No such file"),
    ],
)
def test_weights_that_are_not_all_there_are_refused(tmp_path: Path, spoil: Any, why: str) -> None:
    for name in ("a", "b"):
        save_file({name: torch.zeros(5)}, tmp_path / f"{name}.safetensors")
    index = {"weight_map": {"a": "a.safetensors", "b": "b.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    check_weights(info(tmp_path))
    file = tmp_path / "b.safetensors"
    if spoil is None:
        file.unlink()
    else:
        file.write_bytes(spoil(file.read_bytes()))
    with pytest.raises(ValueError, match=why) as caught:
        check_weights(info(tmp_path))
    message = str(caught.value)
    assert message.startswith("target.path=") and "b.safetensors that cannot be read" in message


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (without("layers.2"), "no weights for layer 2,.*num_hidden_layers=3.*layers 0 to 2"),
        (without("layers.0", "layers.1"), "no weights for layers 0, 1,"),
        (without("layers"), "no weights for layers 0, 1, 2,"),
        (
            without("layers.1.mlp"),
            r"no model\.layers\.1\.mlp\.up_proj\.weight, which other layers have",
        ),
        (
            with_shape("model.embed_tokens.weight", VOCAB + 2, HIDDEN),
            r"embed_tokens\.weight of shape \[12, 4\].*vocab_size=10 rows of hidden_size=4",
        ),
        (with_shape("model.embed_tokens.weight", VOCAB, HIDDEN + 1), r"of shape \[10, 5\]"),
        (with_shape("lm_head.weight", VOCAB - 1, HIDDEN), r"lm_head\.weight of shape \[9, 4\]"),
        (with_shape("lm_head.weight", VOCAB * HIDDEN), r"lm_head\.weight of shape \[40\]"),
    ],
)
def test_weights_of_another_model_are_refused(
    tmp_path: Path, spoil: Callable[[Tensors], Tensors], why: str
) -> None:
    save_file(spoil(model()), tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=why) as caught:
        check_weights(info(tmp_path))
    assert str(caught.value).startswith(f"target.path={str(tmp_path)!r} has")


def test_shards_are_taken_together(tmp_path: Path) -> None:
    tensors = model()
    names = sorted(tensors)
    places = {name: f"model-{k // 5}.safetensors" for k, name in enumerate(names)}
    for file in set(places.values()):
        save_file({n: tensors[n] for n in names if places[n] == file}, tmp_path / file)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": places}))
    check_weights(info(tmp_path))
    check_shared(info(tmp_path))
    index.unlink()
    check_weights(info(tmp_path))
    (tmp_path / "model-1.safetensors").unlink()
    with pytest.raises(ValueError, match="layer"):
        check_weights(info(tmp_path))


@pytest.mark.parametrize(
    ("tensors", "config"),
    [
        # Tied: an lm_head that is there all the same is not looked at.
        (without("lm_head")(model()), {"tie_word_embeddings": True}),
        (with_shape("lm_head.weight", 1, 1)(model()), {"tie_word_embeddings": True}),
        # Embeddings padded as the config.json says.
        (
            with_shape("model.embed_tokens.weight", VOCAB + 6, HIDDEN)(model()),
            {"padded_vocab_size": VOCAB + 6},
        ),
        # Beside the language model, and layers more than it has.
        ({**model(), "model.layers.3.eh_proj.weight": torch.zeros(1)}, {}),
        ({**model(), "vision_tower.layers.7.fc.weight": torch.zeros(1)}, {}),
        (model("model.language_model."), {}),
        (model("language_model.model.", "language_model.lm_head.weight"), {}),
        # Packed, and quantized in some of the layers.
        (
            {**model(), "lm_head.weight": torch.zeros(VOCAB, 1, dtype=torch.uint8)},
            {"quantization_config": {}},
        ),
        (
            {**model(), "model.layers.1.mlp.up_proj.weight_scale": torch.zeros(1)},
            {"quantization_config": {}},
        ),
        # Names that are not known here.
        ({"decoder.tokens": torch.zeros(1), "decoder.blocks.0.w": torch.zeros(1)}, {}),
        (
            {"model.embed_tokens.weight": torch.zeros(VOCAB, HIDDEN), "model.h.0.w": torch.ones(1)},
            {},
        ),
    ],
)
def test_what_cannot_be_told_for_certain_passes(
    tmp_path: Path, tensors: Tensors, config: dict[str, Any]
) -> None:
    save_file(tensors, tmp_path / "model.safetensors")
    check_weights(info(tmp_path, **config))


def test_layers_of_several_kinds_pass(tmp_path: Path) -> None:
    save_file(without("layers.1.mlp")(model()), tmp_path / "model.safetensors")
    check_weights(replace(info(tmp_path), architecture="BailingMoeV3ForCausalLM"))


@pytest.mark.parametrize(
    ("spoil", "why"),
    [(without("lm_head"), "no lm_head"), (without("embed_tokens"), "no token embedding")],
)
def test_what_the_draft_shares_must_be_there(
    tmp_path: Path, spoil: Callable[[Tensors], Tensors], why: str
) -> None:
    save_file(spoil(model()), tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=why):
        check_shared(info(tmp_path))


@pytest.mark.parametrize("where", ["top", "text_config"])
def test_a_tied_target_shares_its_embedding(tmp_path: Path, where: str) -> None:
    tied = {"tie_word_embeddings": True}
    config = tied if where == "top" else {"text_config": tied}
    save_file(without("lm_head")(model()), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    check_shared(info(tmp_path, **config))
    frozen = FrozenTarget.load(tmp_path, torch.float32)
    assert frozen.lm_head is frozen.embedding


@pytest.mark.parametrize("tied", [True, False])
def test_plan_and_trainer_agree_where_the_levels_do_not(tmp_path: Path, tied: bool) -> None:
    """What the text_config says of tying counts in the merged config and in the file's."""
    sizes = {"num_hidden_layers": LAYERS, "hidden_size": HIDDEN, "vocab_size": VOCAB}
    raw = {"tie_word_embeddings": not tied, "text_config": {"tie_word_embeddings": tied, **sizes}}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    tensors = without("lm_head")(model()) if tied else model()
    save_file(tensors, tmp_path / "model.safetensors")
    target = read_target(tmp_path, need_tokenizer=False)
    check_weights(target)
    check_shared(target)
    frozen = FrozenTarget.load(tmp_path, torch.float32)
    assert (frozen.lm_head is frozen.embedding) == tied
    # An lm_head of another size is asked about where it is used, whichever config is at hand.
    save_file({**tensors, "lm_head.weight": torch.zeros(1, 1)}, tmp_path / "model.safetensors")
    for config in (target.config, raw):
        if tied:
            check_weights(replace(target, config=config))
            continue
        with pytest.raises(ValueError, match=r"lm_head\.weight of shape \[1, 1\]"):
            check_weights(replace(target, config=config))
