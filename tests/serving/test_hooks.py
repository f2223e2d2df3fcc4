"""The folded accept computes what SGLang's own does; hooks stay away where they cannot work."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_launch import sglang_folder

from serving import hooks_audit, hooks_fold, hooks_kernels, plugin
from serving.hooks_audit import Counters
from serving.hooks_fold import Fold, glue_refusal, parse_parts
from serving.hooks_kernels import parse_kernels

GAMMA, VOCAB, BATCH, WIDTH = 4, 50, 3, 6


@pytest.fixture(scope="module")
def sglang() -> Any:
    sglang_folder()
    return pytest.importorskip("sglang.srt.speculative.dspark_components.dspark_verify")


class Sync:
    """One rank: nothing to agree on."""

    def enabled(self, site: object) -> bool:
        return False

    def sync(self, site: object, values: torch.Tensor) -> torch.Tensor:
        return values


class Injector:
    """Notes what would be written into the draft's pool."""

    swa_ring_size = None

    def __init__(self) -> None:
        self.calls: list[dict[str, torch.Tensor]] = []

    def inject_target_hidden(self, **arguments: torch.Tensor) -> None:
        self.calls.append(arguments)


def make_worker() -> SimpleNamespace:
    plain = SimpleNamespace(is_translating=False)
    return SimpleNamespace(
        _verify_epilogue=None,
        _verify_executor=SimpleNamespace(verify_epilogue=None),
        _kv_injector=Injector(),
        model_runner=SimpleNamespace(kv_index_translator=plain),
        draft_model_runner=SimpleNamespace(kv_index_translator=plain, token_to_kv_pool=object()),
        draft_model=SimpleNamespace(_fused_kv_write_bundle=lambda pool: "bundle"),
    )


def make_epilogue(
    sglang: Any, worker: Any, *, commit: bool = True, tail: bool = False, relay: bool = False
) -> Any:
    from serving.fold_epilogue import FoldedEpilogue

    context = sglang.CommitInjectCtx(
        draft_model=worker.draft_model,
        block_pos_offsets=torch.arange(GAMMA + 1),
        resolve_pool=lambda: worker.draft_model_runner.token_to_kv_pool,
        resolve_req_to_token=lambda: torch.zeros(8, 4),
        kv_injector=worker._kv_injector,
    )
    epilogue = FoldedEpilogue(
        worker,
        commit=commit,
        max_bs=BATCH,
        verify_num_draft_tokens=GAMMA + 1,
        device="cpu",
        tp_sync=Sync(),
        fused_accept_tail=tail,
        post_fold=relay,
        commit_ctx=context,
    )
    worker._verify_epilogue = worker._verify_executor.verify_epilogue = epilogue
    return epilogue


def make_step(sglang: Any, seed: int, batch: int = BATCH) -> tuple[Any, Any, Any]:
    """A runner, a target's output and a batch in which several drafts are right."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(batch * (GAMMA + 1), VOCAB, generator=generator)
    best = logits.argmax(-1).view(batch, GAMMA + 1)
    ids = torch.randint(VOCAB, (batch, GAMMA + 1), generator=generator)
    for row in range(batch):
        right = int(torch.randint(GAMMA + 1, (1,), generator=generator))
        ids[row, 1 : right + 1] = best[row, :right]
    from sglang.srt.layers.logits_processor import LogitsProcessorOutput

    hidden = torch.randn(batch * (GAMMA + 1), WIDTH, generator=generator)
    out = LogitsProcessorOutput(next_token_logits=logits, hidden_states=hidden)
    slots = torch.arange(batch * (GAMMA + 1)) + 7
    forward_batch = SimpleNamespace(
        forward_mode=SimpleNamespace(is_target_verify=lambda: True),
        batch_size=batch,
        input_ids=ids.reshape(-1),
        seq_lens=torch.tensor([10, 20, 30])[:batch],
        req_pool_indices=torch.tensor([1, 2, 3])[:batch],
        out_cache_loc=slots,
        positions=slots + 100,
    )
    runner = SimpleNamespace(
        ragged_verify_mode=False, model_runner=SimpleNamespace(is_draft_worker=False)
    )
    return runner, out, forward_batch


def expected(ids: torch.Tensor, logits: torch.Tensor) -> tuple[list[int], list[list[int]]]:
    """Accepted drafts and committed tokens, in plain Python."""
    best = logits.argmax(-1).view(ids.shape)
    counts, tokens = [], []
    for row, targets in zip(ids.tolist(), best.tolist(), strict=True):
        count = 0
        while count < GAMMA and row[count + 1] == targets[count]:
            count += 1
        counts.append(count)
        tokens.append([*row[1 : count + 1], targets[count]])
    return counts, tokens


@pytest.mark.parametrize("tail", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_the_folded_accept_is_the_greedy_rule(sglang: Any, seed: int, tail: bool) -> None:
    worker = make_worker()
    epilogue = make_epilogue(sglang, worker, tail=tail)
    runner, out, batch = make_step(sglang, seed)
    epilogue.begin_static_step(BATCH, True)
    epilogue.capture_hook(runner, out, batch, BATCH * (GAMMA + 1))
    counts, tokens = expected(batch.input_ids.view(BATCH, -1), out.next_token_logits)
    accept = epilogue.read_accept(BATCH)
    assert accept.correct_len.tolist() == counts
    assert accept.commit_lens.tolist() == [n + 1 for n in counts]
    assert accept.new_seq_lens.tolist() == [
        n + c + 1 for n, c in zip([10, 20, 30], counts, strict=True)
    ]
    for row, committed in enumerate(tokens):
        assert accept.out_tokens[row, : len(committed)].tolist() == committed
    (call,) = worker._kv_injector.calls
    assert call["commit_lens"].tolist() == [n + 1 for n in counts]
    assert torch.equal(call["target_hidden"], out.hidden_states)
    assert torch.equal(call["cache_loc_2d"], batch.out_cache_loc.view(BATCH, GAMMA + 1))
    assert torch.equal(call["positions"], batch.positions)


def test_lengths_and_bonus_are_relayed_by_request(sglang: Any) -> None:
    epilogue = make_epilogue(sglang, make_worker(), relay=True)
    runner, out, batch = make_step(sglang, 5)
    epilogue.begin_static_step(BATCH, True)
    epilogue.capture_hook(runner, out, batch, BATCH * (GAMMA + 1))
    counts, tokens = expected(batch.input_ids.view(BATCH, -1), out.next_token_logits)
    relay = epilogue.future_relay
    assert relay.new_seq_lens.shape == (8,)
    assert relay.new_seq_lens[1:4].tolist() == [
        n + c + 1 for n, c in zip([10, 20, 30], counts, strict=True)
    ]
    assert relay.output_tokens[1:4].tolist() == [row[-1] for row in tokens]


def test_a_closed_gate_and_padding_write_nothing(sglang: Any) -> None:
    worker = make_worker()
    epilogue = make_epilogue(sglang, worker)
    runner, out, batch = make_step(sglang, 1)
    for rows, armed, wanted in ((BATCH, False, [0, 0, 0]), (1, True, None)):
        epilogue.begin_static_step(rows, armed)
        epilogue.capture_hook(runner, out, batch, BATCH * (GAMMA + 1))
        written = worker._kv_injector.calls[-1]["commit_lens"].tolist()
        assert written[1:] == [0, 0]
        assert wanted is None or written == wanted
    assert written[0] > 0


def test_commit_is_only_folded_where_it_can_be(sglang: Any) -> None:
    worker = make_worker()
    worker.draft_model._fused_kv_write_bundle = lambda pool: None
    epilogue = make_epilogue(sglang, worker)
    epilogue.begin_static_step(BATCH, True)
    epilogue.capture_hook(*make_step(sglang, 2), BATCH * (GAMMA + 1))
    assert not epilogue.folds_commit
    assert worker._kv_injector.calls == []
    assert not epilogue.retired


def test_new_weights_end_the_commit_for_good(sglang: Any) -> None:
    worker = make_worker()
    epilogue = make_epilogue(sglang, worker)
    step = make_step(sglang, 3)
    epilogue.begin_static_step(BATCH, True)
    epilogue.capture_hook(*step, BATCH * (GAMMA + 1))
    assert epilogue.folds_commit
    fold = Fold(frozenset(("accept", "commit")))
    fold.epilogue = epilogue
    # Before a graph holds them, new weights harm nothing.
    fold.after_load(None)
    assert epilogue.folds_commit
    epilogue.commit_captured = True
    fold.after_load(None)
    assert not epilogue.folds_commit
    # What a graph would still run writes nothing: the gate stays shut.
    epilogue.begin_static_step(BATCH, True)
    assert epilogue.inject_gate_buf.tolist() == [0]


def test_a_failing_warm_up_gives_the_step_back(sglang: Any) -> None:
    worker = make_worker()

    def fail(**_: Any) -> None:
        raise RuntimeError("no such kernel")

    worker._kv_injector.inject_target_hidden = fail
    epilogue = make_epilogue(sglang, worker)
    epilogue.begin_static_step(BATCH, True)
    epilogue.capture_hook(*make_step(sglang, 0), BATCH * (GAMMA + 1))
    assert "no such kernel" in epilogue.retired
    assert worker._verify_epilogue is None
    assert worker._verify_executor.verify_epilogue is None
    epilogue.capture_hook(None, None, None, 0)


def test_parts_are_checked() -> None:
    assert parse_parts("accept, commit") == ("accept", "commit")
    assert parse_parts("glue") == ("glue",)
    for wrong in ("acept", "commit", "relay,glue"):
        with pytest.raises(ValueError, match="SPLITSERVE_FOLD"):
            parse_parts(wrong)


def test_metadata_is_glued_for_flash_attention_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class FlashAttentionBackend:
        needs_cpu_seq_lens = False
        topk = 1
        use_sliding_window_kv_pool = False
        kv_index_translator = SimpleNamespace(reads_are_translated=False)

    backend = FlashAttentionBackend()
    assert glue_refusal(backend) == ""
    fold = Fold(frozenset(("glue",)))
    assert fold.glue(lambda b: "declares nothing", backend) == ""
    assert hooks_fold.LOG_MARK in caplog.text and "FlashAttentionBackend in a graph" in caplog.text
    assert fold.glue(lambda b: "", object()) == ""
    backend.needs_cpu_seq_lens = True
    assert fold.glue(lambda b: "declares nothing", backend) == "host sequence lengths"
    assert glue_refusal(SimpleNamespace(**vars(FlashAttentionBackend))) != ""


def test_every_hooked_place_exists(sglang: Any) -> None:
    import pkgutil

    places = [hooks_fold.WORKER, hooks_fold.LOAD, hooks_fold.GLUE_DRAFT, hooks_fold.GLUE_VERIFY]
    places += [hooks_audit.DECODE, hooks_audit.ACCEPT, hooks_audit.FORWARD]
    places += [hooks_audit.NEEDS_CPU, *hooks_audit.LOOPS.values()]
    for place in places:
        assert callable(pkgutil.resolve_name(place)), place


def test_the_switches_exist(sglang: Any) -> None:
    from sglang.srt.environ import envs

    for name in hooks_fold.SGLANG_SWITCHES:
        assert getattr(envs, name).get() is False, name


def test_nothing_is_hooked_unless_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(hooks_fold.ENVIRONMENT, raising=False)
    monkeypatch.delenv(hooks_audit.ENVIRONMENT, raising=False)
    hooked: list[str] = []
    monkeypatch.setattr(hooks_fold, "register", lambda *_: hooked.append("fold"))
    monkeypatch.setattr(hooks_audit, "register", lambda *_: hooked.append("audit"))
    plugin.register()
    assert hooked == []


def test_both_are_hooked_when_asked(sglang: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(hooks_fold.ENVIRONMENT, "accept,commit,glue")
    monkeypatch.setenv(hooks_audit.ENVIRONMENT, "/nowhere/audit")
    from sglang.srt.plugins.hook_registry import HookRegistry

    places: list[str] = []
    monkeypatch.setattr(HookRegistry, "register", lambda place, *_: places.append(place))
    plugin.register()
    assert {hooks_fold.WORKER, hooks_fold.LOAD, hooks_fold.GLUE_DRAFT} <= set(places)
    assert hooks_audit.FORWARD in places


# --- counters ------------------------------------------------------------------------------------


def mode(verify: bool, decode: bool = False) -> SimpleNamespace:
    return SimpleNamespace(is_target_verify=lambda: verify, is_decode=lambda: decode)


def test_counts_of_steps_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counters = Counters(str(tmp_path / "audit"))
    monkeypatch.setattr(counters, "_note_runner", lambda runner: None)
    counters.before_loop("overlap")()
    counters.after_needs_cpu(False)
    for graph in (True, True, False):
        batch = SimpleNamespace(forward_mode=mode(True))
        for draft in (False, True):
            runner = SimpleNamespace(is_draft_worker=draft)
            counters.after_forward(SimpleNamespace(can_run_graph=graph), runner, batch)
    prefill = SimpleNamespace(forward_mode=mode(False))
    counters.after_forward(SimpleNamespace(can_run_graph=False), None, prefill)
    counters.after_accept(None, None, folded_accept=True)
    counters.after_accept(None, None, folded_accept=False)
    counters.write()
    (file,) = tmp_path.glob("audit.*.json")
    found = json.loads(file.read_text())
    assert found["counts"] == {
        "verify_graph": 2,
        "verify_eager": 1,
        "draft_graph": 2,
        "draft_eager": 1,
        "accept_graph": 1,
        "accept_eager": 1,
    }
    assert found["facts"] == {"event_loop": "overlap", "needs_cpu_seq_lens": False}


def test_a_failing_hook_leaves_sglang_alone() -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise KeyError("gone")

    hook = hooks_audit._quiet(fail)
    assert hook(1, two=2) is None
    assert hook(1) is None


def test_kernels_are_named_by_their_parts() -> None:
    assert parse_kernels("all") == hooks_kernels.PARTS
    assert parse_kernels("linear, linear") == ("linear",)
    with pytest.raises(ValueError, match="allowed: all, or of attention, linear"):
        parse_kernels("linear,moe")


def test_hooked_kernels_say_so_at_once(caplog: pytest.LogCaptureFixture) -> None:
    hooked: list[str] = []
    kind = SimpleNamespace(AROUND="around")
    hooks_kernels.register(lambda name, *_: hooked.append(name), kind, parse_kernels("all"))
    assert [record.getMessage() for record in caplog.records] == [
        f"kernels: {part} is hooked" for part in hooks_kernels.PARTS
    ]
    assert len(hooked) == len(set(hooked)) == 14
