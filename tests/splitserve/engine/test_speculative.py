"""What the plugin adds to an engine that speculates, and how a draft is replaced in it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engine_testing import make_spec
from safetensors.torch import save_file

from splitserve.engine.arguments import engine_arguments, graph_batch_sizes
from splitserve.engine.control import ControlBlock, DraftSource
from splitserve.engine.draft_loader import draft_tag, load_draft, update_messages
from splitserve.engine.speculative import ProposalRecorder, keep_last_states, proposal_rid
from splitserve.transport.ring import RingOwner


class FakeDraft:
    """Takes weights as SGLang's draft model does, with its stale copies."""

    def __init__(self) -> None:
        self.loaded: list[dict[str, torch.Tensor]] = []
        self._fused_kv_write_cache: Any = ("pool", "old")
        self._stacked_ctx_kv_cache: Any = {"weight": "old"}

    def load_weights(self, weights: Any) -> None:
        self.loaded.append(dict(weights))


class FakeExchange:
    """Holds one version, and may lose it while it is being read."""

    def __init__(self, version: int, *, lost_while_read: bool = False) -> None:
        self._version, self._lost = version, lost_while_read

    def get(self, version: int) -> dict[str, torch.Tensor] | None:
        return {"fc.weight": torch.full((2,), 7.0)} if version == self._version else None

    def still(self, version: int) -> bool:
        return not self._lost


@pytest.fixture
def folder(tmp_path: Path) -> str:
    save_file({"fc.weight": torch.full((2,), 5.0)}, tmp_path / "model.safetensors")
    return str(tmp_path)


def test_the_exchange_gives_the_version_that_it_holds(folder: str) -> None:
    model = FakeDraft()
    assert load_draft(model, 4, folder, FakeExchange(4)) is DraftSource.DEVICE
    assert [d["fc.weight"][0].item() for d in model.loaded] == [7.0]
    assert model._fused_kv_write_cache is None
    assert not hasattr(model, "_stacked_ctx_kv_cache")


@pytest.mark.parametrize("exchange", [None, FakeExchange(3), FakeExchange(4, lost_while_read=True)])
def test_the_folder_serves_where_the_exchange_does_not(folder: str, exchange: Any) -> None:
    model = FakeDraft()
    assert load_draft(model, 4, folder, exchange) is DraftSource.FOLDER
    assert model.loaded[-1]["fc.weight"][0].item() == 5.0
    assert model._fused_kv_write_cache is None


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no weights"):
        load_draft(FakeDraft(), 1, str(tmp_path), None)


def test_a_tag_survives_a_folder_with_the_separator() -> None:
    assert draft_tag(12, "/a|b/c").split("|", 2)[1:] == ["12", "/a|b/c"]


def test_every_rank_can_read_its_message() -> None:
    from sglang.srt.utils import MultiprocessingSerializer

    read = [MultiprocessingSerializer.deserialize(m) for m in update_messages(3, "/a", 3)]
    assert [name for ((name, _),) in read] == [draft_tag(3, "/a")] * 3


def test_the_control_block_is_seen_by_whoever_attaches() -> None:
    owner = ControlBlock.create()
    other = ControlBlock.attach(owner.path)
    assert owner.draft() == (-1, DraftSource.NONE)
    other.note_draft(40, DraftSource.DEVICE)
    assert owner.draft() == (40, DraftSource.DEVICE)
    other.close()
    owner.close()


def test_only_the_first_window_of_a_marked_request_is_written_down() -> None:
    control = ControlBlock.create()
    recorder = ProposalRecorder(control.path)

    def step(rids: list[Any], ids: list[list[int]]) -> None:
        requests = [SimpleNamespace(rid=rid) for rid in rids]
        recorder.after_verify(None, None, reqs=requests, verify_ids_2d=torch.tensor(ids), bs=2)

    assert control.proposal(3) is None
    step(["other", proposal_rid(3)], [[1, 2, 3], [4, 5, 6]])
    step([proposal_rid(3), None], [[7, 8, 9], [0, 0, 0]])
    assert control.proposal(3) == [4, 5, 6]
    assert control.proposal(4) is None
    control.close()


def test_states_before_the_lm_head_are_kept() -> None:
    processor = SimpleNamespace(keep_last_hidden_states=False)
    keep_last_states(None, processor, object(), skip_all_gather=True)
    assert processor.keep_last_hidden_states


@pytest.mark.parametrize(
    ("largest", "sizes"),
    [(1, (1,)), (8, (1, 2, 4, 8)), (48, (1, 2, 4, 8, 16, 24, 32, 48))],
)
def test_graphs_are_captured_up_to_the_largest_batch(largest: int, sizes: tuple[int]) -> None:
    assert graph_batch_sizes(largest) == sizes


def test_an_engine_with_a_draft_speculates_and_one_without_captures(ring: RingOwner) -> None:
    captures = engine_arguments(make_spec("/t", ring, device="cuda"), "LlamaForCausalLM")
    assert captures["enable_return_aux_hidden_states"]
    spec = make_spec("/t", ring, device="cuda", draft_path="/d")
    speculates = engine_arguments(spec, "LlamaForCausalLM")
    assert "enable_return_aux_hidden_states" not in speculates
    assert speculates["speculative_algorithm"] == "DSPARK"
    assert speculates["speculative_draft_model_path"] == "/d"
    assert speculates["custom_weight_loader"] == ["splitserve.engine.draft_loader.load"]
