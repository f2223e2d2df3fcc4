"""Drafts written beside training, and what their failing does to it."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
import torch

from dspark.checkpoint import load_draft
from dspark.config import DraftConfig
from dspark.model import DSparkDraft
from splitserve.messages import SnapshotReady
from splitserve.train import snapshots
from splitserve.train.snapshots import SnapshotWriter
from splitserve.transport.weights import DraftExchange

CONFIG = DraftConfig(
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
    vocab_size=31,
    rms_norm_eps=1e-5,
    rope_parameters={"rope_type": "default", "rope_theta": 1000.0},
    max_position_embeddings=64,
    block_size=3,
    target_layer_ids=(1,),
    num_target_layers=2,
    mask_token_id=5,
    markov_rank=4,
)


def state_of(seed: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    return {name: torch.randn_like(p) for name, p in DSparkDraft(CONFIG).named_parameters()}


def served(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {
        name: value if name.startswith("confidence_head.") else value.bfloat16()
        for name, value in state.items()
    }


def test_training_goes_on_while_a_snapshot_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Told only once it is there; the next one waits for it."""
    gate = threading.Event()
    save = snapshots.save_draft

    def slow_save(*arguments: object) -> None:
        assert gate.wait(30.0)
        save(*arguments)

    monkeypatch.setattr(snapshots, "save_draft", slow_save)
    sent: list[SnapshotReady] = []
    writer = SnapshotWriter(sent.append, CONFIG, "cpu")
    states = [state_of(0), state_of(1)]
    writer.begin(0, tmp_path / "a", states[0])
    writer.check()
    assert sent == [] and not (tmp_path / "a").exists()
    threading.Timer(0.2, gate.set).start()
    writer.begin(2, tmp_path / "b", states[1])
    assert sent[0] == SnapshotReady(0, str(tmp_path / "a"))
    writer.join()
    assert sent[1:] == [SnapshotReady(2, str(tmp_path / "b"))]
    for folder, state in zip((tmp_path / "a", tmp_path / "b"), states, strict=True):
        found = dict(load_draft(folder).named_parameters())
        for name, value in served(state).items():
            assert torch.equal(found[name], value), name


def test_a_disk_that_takes_nothing_ends_the_training(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    sent: list[SnapshotReady] = []
    writer = SnapshotWriter(sent.append, CONFIG, "cpu")
    writer.begin(4, blocked / "step", state_of(0))
    deadline = time.monotonic() + 30.0
    with pytest.raises(ValueError, match=r"could not be written.*resume=true"):
        while time.monotonic() < deadline:
            writer.check()
            time.sleep(0.01)
    assert sent == []
    writer.join()


def test_the_exchange_has_the_weights_before_anybody_is_told(tmp_path: Path) -> None:
    state = state_of(3)
    entries = [
        (name, tuple(value.shape), str(value.dtype).removeprefix("torch."))
        for name, value in served(state).items()
    ]
    exchange = DraftExchange.create(entries)
    told: list[int] = []
    writer = SnapshotWriter(lambda _: told.append(exchange.version), CONFIG, "cpu", exchange)
    writer.begin(6, tmp_path / "s", state)
    writer.join()
    assert told == [6]
    found = exchange.get(6)
    assert found is not None
    for name, value in served(state).items():
        assert torch.equal(found[name], value), name
    assert exchange.still(6)
    del found
    exchange.close()
