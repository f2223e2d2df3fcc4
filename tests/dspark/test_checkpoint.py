"""Exports: bit-equal round trips, what is found to be wrong, and disks that fill up."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from draft_testing import random_draft, tiny_config
from safetensors.torch import load_file, save_file

from dspark.checkpoint import expected_tensors, load_draft, save_draft, verify_export
from dspark.model import DSparkDraft


def export(folder: Path, *, seed: int = 0, **changes) -> DSparkDraft:
    draft = random_draft(tiny_config(**changes), seed)
    save_draft(folder, draft.config, draft.state_dict())
    return draft


def outputs(draft: DSparkDraft) -> list[torch.Tensor]:
    config, g = draft.config, torch.Generator().manual_seed(3)
    dtype = draft.fc.weight.dtype
    states = torch.randn(1, 9, config.num_context_features, generator=g).to(dtype)
    embeds = torch.randn(1, 2, config.block_size, config.hidden_size, generator=g).to(dtype)
    anchors, prev = torch.tensor([[4, 8]]), torch.tensor([[[1, 2, 3], [4, 5, 6]]])
    context = draft.context_kv(states, torch.arange(9).unsqueeze(0))
    mask = torch.arange(9).view(1, 1, 9) < anchors.unsqueeze(2)
    hidden = draft.forward_blocks(embeds, anchors, context, mask)
    features = draft.markov_features(hidden, prev)
    return [
        hidden,
        draft.confidence_logits(hidden, prev),
        *([] if features is None else [features]),
    ]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"markov_head_type": "gated"},
        {"markov_head_type": "rnn", "confidence_head_with_markov": False},
        {"markov_rank": 0},
        {"attention_bias": True, "num_hidden_layers": 1},
        {"rope_parameters": {
            "rope_type": "llama3", "rope_theta": 1000.0, "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 32,
        }},
    ],
)  # fmt: skip
def test_a_reloaded_draft_is_bit_equal(tmp_path, changes):
    draft = export(tmp_path / "draft", **changes)
    loaded = load_draft(tmp_path / "draft", torch.bfloat16)
    # What the export rounds to: all but the confidence head.
    confidence = {n: p.clone() for n, p in draft.confidence_head.state_dict().items()}
    draft.to(torch.bfloat16)
    draft.confidence_head.float().load_state_dict(confidence)
    assert loaded.config == draft.config
    assert loaded.confidence_head.proj.weight.dtype == torch.float32
    for name, value in draft.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name
    # Weights lie in memory as the file has them, and on some CPUs sums depend on the address.
    loaded.load_state_dict({n: v.clone() for n, v in loaded.state_dict().items()}, assign=True)
    for ours, theirs in zip(outputs(draft), outputs(loaded), strict=True):
        assert torch.equal(ours, theirs)
    # Once more round: nothing is left to be rounded.
    save_draft(tmp_path / "again", loaded.config, loaded.state_dict())
    first, second = (load_file(tmp_path / n / "model.safetensors") for n in ("draft", "again"))
    assert all(torch.equal(first[n], second[n]) for n in first)


def test_whoever_reads_the_config_reads_the_weights(tmp_path):
    export(tmp_path / "draft")
    modes = {file.name: file.stat().st_mode for file in (tmp_path / "draft").iterdir()}
    assert len(modes) == 2 and len(set(modes.values())) == 1, modes


def test_types_and_names_of_an_export(tmp_path):
    draft = export(tmp_path / "d")
    tensors = load_file(tmp_path / "d" / "model.safetensors")
    assert set(tensors) == set(draft.state_dict())
    for name, tensor in tensors.items():
        wanted = torch.float32 if name.startswith("confidence_head.") else torch.bfloat16
        assert tensor.dtype == wanted, name
    assert sorted(os.listdir(tmp_path / "d")) == ["config.json", "model.safetensors"]
    assert os.listdir(tmp_path) == ["d"]


def test_a_draft_loads_in_float32_and_is_frozen(tmp_path):
    export(tmp_path / "d")
    draft = load_draft(tmp_path / "d", torch.float32)
    assert all(p.dtype == torch.float32 and not p.requires_grad for p in draft.parameters())
    assert not draft.training


def tamper(folder: Path, change) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("layers.1.mlp.up_proj.weight"), "missing layers.1.mlp.up_proj.weight"),
        (lambda t: t.pop("confidence_head.proj.bias"), "missing confidence_head.proj.bias"),
        (lambda t: t.update(extra=torch.zeros(1)), "unknown extra"),
        (lambda t: t.update({"model.fc.weight": t.pop("fc.weight")}), "unknown model.fc.weight"),
        (lambda t: t.update({"norm.weight": t["norm.weight"].float()}), "norm.weight is"),
        (lambda t: t.update({"norm.weight": t["norm.weight"][:-1].clone()}), "norm.weight is"),
        (lambda t: t.update({"confidence_head.proj.bias": torch.zeros(1).half()}), "proj.bias is"),
    ],
)
def test_weights_that_do_not_fit_are_named(tmp_path, change, message):
    export(tmp_path / "d")
    verify_export(tmp_path / "d")
    tamper(tmp_path / "d", change)
    with pytest.raises(ValueError, match=message):
        verify_export(tmp_path / "d")
    with pytest.raises(ValueError, match=message):
        load_draft(tmp_path / "d")


def test_a_config_of_another_shape_is_found(tmp_path):
    export(tmp_path / "d")
    path = tmp_path / "d" / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "markov_rank": 7}))
    with pytest.raises(ValueError, match="markov_w1"):
        verify_export(tmp_path / "d")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
@pytest.mark.parametrize("content", [None, b"", b"\x00{not json"])
def test_broken_files_are_named(tmp_path, name, content):
    export(tmp_path / "d")
    path = tmp_path / "d" / name
    path.unlink() if content is None else path.write_bytes(content)
    with pytest.raises(ValueError, match=name.replace(".", r"\.")):
        verify_export(tmp_path / "d")


def test_a_truncated_weights_file_is_found(tmp_path):
    export(tmp_path / "d")
    path = tmp_path / "d" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ValueError, match="cannot be read"):
        verify_export(tmp_path / "d")


@pytest.mark.parametrize("change", ["missing", "extra", "shape"])
def test_a_wrong_state_is_refused_before_anything_is_written(tmp_path, change):
    draft = random_draft(tiny_config())
    state = dict(draft.state_dict())
    if change == "missing":
        del state["fc.weight"]
    elif change == "extra":
        state["lm_head.weight"] = torch.zeros(1)
    else:
        state["norm.weight"] = torch.zeros(3)
    with pytest.raises(ValueError, match="do not fit"):
        save_draft(tmp_path / "d", draft.config, state)
    assert os.listdir(tmp_path) == []


def test_plain_dflash_is_saved_but_not_servable(tmp_path):
    export(tmp_path / "d", markov_rank=0)
    verify_export(tmp_path / "d")
    with pytest.raises(ValueError, match=r"markov_rank=0 cannot be served.*allowed: 1 or more"):
        verify_export(tmp_path / "d", servable=True)
    export(tmp_path / "e")
    verify_export(tmp_path / "e", servable=True)


def test_an_export_replaces_an_older_one(tmp_path):
    export(tmp_path / "d", seed=0)
    (tmp_path / "d" / "stray").write_text("left by hand")
    newer = export(tmp_path / "d", seed=1)
    loaded = load_draft(tmp_path / "d", torch.float32)
    assert torch.equal(loaded.fc.weight, newer.fc.weight.to(torch.bfloat16).float())
    assert os.listdir(tmp_path) == ["d"]
    assert sorted(os.listdir(tmp_path / "d")) == ["config.json", "model.safetensors"]


def test_leftovers_of_an_interrupted_export_do_not_matter(tmp_path):
    for name in (".d.partial", ".d.replaced"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(b"half")
    export(tmp_path / "d")
    export(tmp_path / "d", seed=1)
    verify_export(tmp_path / "d")
    assert os.listdir(tmp_path) == ["d"]


FULL_DISK = """
import resource, sys
sys.path[:0] = sys.argv[2:]
from draft_testing import random_draft, tiny_config
from dspark.checkpoint import save_draft
draft = random_draft(tiny_config(), seed=9)
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
try:
    save_draft(sys.argv[1], draft.config, draft.state_dict())
except OSError as error:
    print(error)
"""


def test_a_full_disk_leaves_the_older_export(tmp_path):
    """A limit on file sizes stands in for the disk: the write fails part way."""
    older = export(tmp_path / "d")
    paths = [str(Path(__file__).parent), str(Path(__file__).parents[2])]
    done = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(tmp_path / "d"), *paths],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert f"draft {tmp_path / 'd'} could not be written" in done.stdout
    loaded = load_draft(tmp_path / "d", torch.float32)
    assert torch.equal(loaded.fc.weight, older.fc.weight.to(torch.bfloat16).float())
    assert os.listdir(tmp_path) == ["d"]


@pytest.mark.parametrize("step", ["rename", "fsync"])
def test_an_error_before_the_swap_leaves_the_older_export(tmp_path, monkeypatch, step):
    older = export(tmp_path / "d")

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, step, fail)
    with pytest.raises(OSError, match=r"draft .* could not be written: .*No space left"):
        export(tmp_path / "d", seed=1)
    monkeypatch.undo()
    loaded = load_draft(tmp_path / "d", torch.float32)
    assert torch.equal(loaded.fc.weight, older.fc.weight.to(torch.bfloat16).float())


def test_expected_tensors_by_hand():
    config = tiny_config(num_hidden_layers=1, markov_head_type="rnn")
    found = expected_tensors(config)
    h, r, v, d = 24, 6, 67, 8
    assert found["fc.weight"] == ((h, 2 * h), torch.bfloat16)
    assert found["layers.0.self_attn.q_proj.weight"] == ((4 * d, h), torch.bfloat16)
    assert found["layers.0.self_attn.k_proj.weight"] == ((2 * d, h), torch.bfloat16)
    assert found["layers.0.self_attn.k_norm.weight"] == ((d,), torch.bfloat16)
    assert found["markov_head.markov_w1.weight"] == ((v, r), torch.bfloat16)
    assert found["markov_head.markov_w2.weight"] == ((v, r), torch.bfloat16)
    assert found["markov_head.joint_proj.weight"] == ((3 * r, 2 * r + h), torch.bfloat16)
    assert found["confidence_head.proj.weight"] == ((1, h + r), torch.float32)
    assert len(found) == 20
