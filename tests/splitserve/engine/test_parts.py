"""The engine's parts on their own: shim, CPU attention, products, sampling, hook, plugin check."""

from __future__ import annotations

import importlib.util
import sys
import types
from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from splitserve.engine import (
    cpu_attention,
    cpu_linear,
    cpu_sampling,
    plugin,
    plugin_check,
    rotary_shim,
)
from splitserve.engine.base import EngineError, EngineSpec
from splitserve.messages import SlotRef
from splitserve.transport.ring import RingAddress, RingLayout, RingOwner, RingReader


@pytest.mark.parametrize("is_neox", [True, False])
@pytest.mark.parametrize("rotary_dim", [8, 4])
@pytest.mark.parametrize("is_flat", [True, False])
def test_rotary_shim_rotates_pairs_in_place(is_neox: bool, rotary_dim: int, is_flat: bool) -> None:
    torch.manual_seed(0)
    positions = torch.tensor([0, 3, 7])
    angles = torch.rand(9, rotary_dim // 2) * 6
    cache = torch.cat([angles.cos(), angles.sin()], dim=-1)
    query, key = torch.randn(3, 2, 8), torch.randn(3, 1, 8)
    expected = [x.clone() for x in (query, key)]
    for tensor in expected:
        for row, position in enumerate(positions.tolist()):
            for pair in range(rotary_dim // 2):
                i, j = (pair, pair + rotary_dim // 2) if is_neox else (2 * pair, 2 * pair + 1)
                a, b = tensor[row, :, i].clone(), tensor[row, :, j].clone()
                cos, sin = angles[position, pair].cos(), angles[position, pair].sin()
                tensor[row, :, i] = a * cos - b * sin
                tensor[row, :, j] = b * cos + a * sin
    if is_flat:
        query, key = query.view(3, -1), key.view(3, -1)
    rotary_shim.rotary_embedding(positions, query, key, 8, cache, is_neox)
    torch.testing.assert_close(query.view(3, 2, 8), expected[0])
    torch.testing.assert_close(key.view(3, 1, 8), expected[1])


def test_rotary_shim_takes_vllms_place_only_where_it_is_absent(monkeypatch) -> None:
    if importlib.util.find_spec("vllm") is not None:
        pytest.skip("vLLM is installed")
    monkeypatch.setitem(sys.modules, "vllm", types.ModuleType("vllm"))
    assert not rotary_shim.install()
    monkeypatch.delitem(sys.modules, "vllm")
    assert rotary_shim.install()
    from vllm._custom_ops import rotary_embedding

    assert rotary_embedding is rotary_shim.rotary_embedding
    with pytest.raises(ImportError):
        from vllm._custom_ops import rms_norm  # noqa: F401
    for name in ("vllm", "vllm._custom_ops"):
        monkeypatch.delitem(sys.modules, name)


LENGTHS = [5, 1, 9]


def _cache() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    keys, values = torch.randn(40, 2, 8), torch.randn(40, 2, 8)
    table = torch.randperm(40)[: 4 * 10].view(4, 10).to(torch.int32)
    return keys, values, table, torch.tensor([2, 0, 3])


def _expected(query, keys, values, table, rows, lengths, new) -> torch.Tensor:
    """One request and one row at a time."""
    outputs, start = [], 0
    for row, length, added in zip(rows.tolist(), lengths, new, strict=True):
        places = table[row, :length].long()
        k, v = (x[places].repeat_interleave(2, 1).transpose(0, 1) for x in (keys, values))
        for i in range(added):
            seen = length - added + i + 1
            q = query[start + i][:, None]
            outputs.append(scaled_dot_product_attention(q, k[:, :seen], v[:, :seen])[:, 0])
        start += added
    return torch.stack(outputs)


def _forbidden(*_: object, **__: object) -> torch.Tensor:
    raise AssertionError("fell back to SGLang's own loop")


def test_batched_decode_attention_equals_one_by_one() -> None:
    keys, values, table, rows = _cache()
    # What lies past a sequence's end must not matter, not even as NaN.
    used = torch.cat([table[r, :n].long() for r, n in zip(rows.tolist(), LENGTHS, strict=True)])
    unused = torch.ones(40, dtype=torch.bool)
    unused[used] = False
    keys[unused], values[unused] = float("nan"), float("nan")
    seq_lens = torch.tensor(LENGTHS)
    backend = SimpleNamespace(req_to_token_pool=SimpleNamespace(req_to_token=table))
    batch = SimpleNamespace(
        encoder_lens=None,
        seq_lens=seq_lens,
        seq_lens_cpu=seq_lens,
        req_pool_indices=rows,
        forward_mode=SimpleNamespace(is_decode=lambda: True),
    )
    cpu_attention.plan_forward(None, backend, batch)
    query, output = torch.randn(3, 4, 8), torch.full((3, 4, 8), float("nan"))
    cpu_attention.decode_attention(
        _forbidden, backend, query, output, keys, values, table, rows, seq_lens, None
    )
    expected = _expected(query, keys, values, table, rows, LENGTHS, [1, 1, 1])
    torch.testing.assert_close(output, expected)


def test_extend_attention_equals_one_by_one_with_and_without_prefix() -> None:
    keys, values, table, rows = _cache()
    new = [5, 1, 4]
    seq_lens = torch.tensor(LENGTHS)
    backend = SimpleNamespace()
    plan = cpu_attention.plan_extend(table, rows, seq_lens, LENGTHS, new)
    setattr(backend, cpu_attention._PLAN, plan)
    query, output = torch.randn(10, 4, 8), torch.full((10, 4, 8), float("nan"))
    cpu_attention.extend_attention(
        _forbidden, backend, query, output, keys, values, table, rows, seq_lens, causal=True
    )
    expected = _expected(query, keys, values, table, rows, LENGTHS, new)
    torch.testing.assert_close(output, expected)


@pytest.mark.parametrize(
    "options", [{"sliding_window_size": 4}, {"is_cross_attn": True}, {"other_batch": True}]
)
def test_unusual_attention_goes_to_sglang(options: dict) -> None:
    keys, values, table, rows = _cache()
    seq_lens = torch.tensor(LENGTHS)
    plan = cpu_attention.plan_decode(table, rows, seq_lens, LENGTHS)
    backend = SimpleNamespace(**{cpu_attention._PLAN: plan})
    if options.pop("other_batch", False):
        seq_lens = seq_lens.clone()
    query = torch.randn(3, 4, 8)
    marker = torch.zeros(1)
    result = cpu_attention.decode_attention(
        lambda *_, **__: marker,
        backend,
        query,
        query,
        keys,
        values,
        table,
        rows,
        seq_lens,
        None,
        **options,
    )
    assert result is marker


def test_packed_products_are_the_same_bit_for_bit_and_follow_the_weight() -> None:
    if not cpu_linear.is_supported():
        pytest.skip("this CPU has no bfloat16 products in oneDNN")
    layer = torch.nn.Linear(64, 96, bias=True).bfloat16().requires_grad_(False)
    for num_rows in (1, 7, 33):
        x = torch.randn(num_rows, 64).bfloat16()
        expected = torch.nn.functional.linear(x, layer.weight, layer.bias)
        assert torch.equal(cpu_linear.linear(_forbidden, None, layer, x, layer.bias), expected)
    layer.weight.mul_(2)
    x = torch.randn(3, 64).bfloat16()
    expected = torch.nn.functional.linear(x, layer.weight)
    assert torch.equal(cpu_linear.linear(_forbidden, None, layer, x), expected)
    marker = torch.zeros(1)
    long = torch.randn(500, 64).bfloat16()
    assert cpu_linear.linear(lambda *_: marker, None, layer, long) is marker
    assert cpu_linear.linear(lambda *_: marker, None, layer, x.float()) is marker


def test_drawn_tokens_have_the_distribution() -> None:
    torch.manual_seed(0)
    probs = torch.tensor([0.5, 0.0, 0.2, 0.3])
    drawn = cpu_sampling.draw(probs.repeat(20_000, 1), torch.rand(20_000, dtype=torch.float64))
    share = torch.bincount(drawn, minlength=4) / 20_000
    assert share[1] == 0
    torch.testing.assert_close(share, probs, rtol=0, atol=0.015)


def test_draw_equals_one_running_sum_over_the_vocabulary() -> None:
    torch.manual_seed(3)
    probs = torch.rand(400, 1000).pow(20)
    numbers = torch.rand(400, dtype=torch.float64)
    sums = probs.double().cumsum(-1)
    expected = torch.searchsorted(sums, numbers[:, None] * sums[:, -1:], right=True)[:, 0]
    assert torch.equal(cpu_sampling.draw(probs, numbers), expected)


def test_draw_at_the_edges_never_takes_an_impossible_token() -> None:
    probs = torch.tensor([[0.0, 0.4, 0.0, 0.6, 0.0]])
    for number, token in ((0.0, 1), (0.3999, 1), (0.4001, 3), (1 - 2**-52, 3)):
        assert cpu_sampling.draw(probs, torch.tensor([number], dtype=torch.float64)) == token


def test_filtered_rows_follow_top_k_top_p_and_greedy() -> None:
    probs = torch.tensor([0.1, 0.5, 0.15, 0.25]).repeat(4000, 1)
    rows = torch.arange(4000) % 4
    top_ks = torch.tensor([1, 2, 4, 4])[rows]
    top_ps = torch.tensor([1.0, 1.0, 0.8, 1.0])[rows]
    drawn = cpu_sampling.draw_filtered(
        _forbidden, probs, top_ks, top_ps, torch.zeros(4000), False, None, torch.zeros(4000).long()
    )
    assert set(drawn[rows == 0].tolist()) == {1}
    assert set(drawn[rows == 1].tolist()) == {1, 3}
    # Token 2 starts at mass 0.75 < 0.8, token 0 at 0.9.
    assert set(drawn[rows == 2].tolist()) == {1, 2, 3}
    assert set(drawn[rows == 3].tolist()) == {0, 1, 2, 3}
    share = (drawn[rows == 1] == 1).float().mean()
    assert abs(share - 2 / 3) < 0.06


def test_seeded_numbers_depend_on_seed_and_position_only() -> None:
    def numbers(rids: list[str], positions: list[int]) -> list[float]:
        cpu_sampling.note_seeds(None, None, SimpleNamespace(rids=rids))
        return cpu_sampling.uniforms(len(rids), torch.tensor(positions)).tolist()

    mine, other = cpu_sampling.generate_rid(5, "a:b"), cpu_sampling.generate_rid(None, "x")
    alone = numbers([mine], [7])[0]
    assert numbers([other, mine], [7, 7])[1] == alone
    assert numbers([mine], [8])[0] != alone
    assert numbers([other], [7]) != numbers([other], [7])
    many = torch.tensor([cpu_sampling.hashed_uniform(s, p) for s in range(60) for p in range(60)])
    assert many.min() >= 0 and many.max() < 1
    assert abs(many.mean() - 0.5) < 0.02


def test_a_request_id_names_its_slot() -> None:
    slot = SlotRef(3, 64, 1024, 17, 9)
    rid = plugin.teach_rid("main", slot, "user:3/0")
    assert plugin.parse_rid(rid) == ("main", slot)
    for foreign in ("abc", "splitserve-generate:1:a", None, "HEALTH_CHECK_0"):
        assert plugin.parse_rid(foreign) is None


def test_without_its_variable_the_plugin_does_nothing(monkeypatch) -> None:
    monkeypatch.delenv(plugin.ENVIRONMENT, raising=False)
    monkeypatch.setitem(sys.modules, "sglang", None)
    plugin.register()


LAYOUT = RingLayout(6, 3, "float32")


class _Batch:
    """A mixed batch: a sample's second chunk, a foreign request, another sample, a decode row."""

    def __init__(self, rids: list[object]) -> None:
        self.rids = rids
        self.extend_prefix_lens_cpu = [4, 0, 0, 11]
        self.extend_seq_lens_cpu = [3, 2, 5, 1]
        self.positions = torch.tensor([4, 5, 6, 0, 1, 0, 1, 2, 3, 4, 11])
        self.input_ids = torch.arange(100, 111)
        self.forward_mode = SimpleNamespace(is_extend_without_speculative=lambda: True)


@pytest.fixture
def hook(monkeypatch):
    owner = RingOwner.create(1 << 14, LAYOUT)
    config = plugin.CaptureConfig({"main": owner.address.to_json()}, "cpu")
    monkeypatch.setattr(plugin, "tensor_parallel_rank", lambda: 0)
    capture = plugin.Capture(plugin.CaptureConfig.from_json(config.to_json()))
    runner = SimpleNamespace(is_draft_worker=False)
    features, states = torch.randn(11, 6), torch.randn(11, 3)

    def call(batch: _Batch, **changes: torch.Tensor | None) -> None:
        fields = {"hidden_states": features, "last_hidden_states": states} | changes
        output = SimpleNamespace(logits_output=SimpleNamespace(**fields))
        capture.after_forward(output, runner, batch)

    yield owner, call, features, states, capture
    owner.close()


def test_the_hook_takes_the_rows_of_marked_requests_only(hook) -> None:
    owner, call, features, states, capture = hook
    first, second = owner.allocate(7), owner.allocate(5)
    # The one that the hook goes on with: a sample's chunks go through the same writer.
    writer = capture._writer("main")
    early = torch.randn(4, 6), torch.randn(4, 3), torch.arange(96, 100)
    writer.write_rows(first, 0, *early)
    rids = [plugin.teach_rid("main", s, "x") for s in (first, second)]
    call(_Batch([rids[0], "foreign", rids[1], "decoding"]))
    assert writer.check(first, torch.arange(96, 103)) is None
    assert writer.check(second, torch.arange(105, 110)) is None
    reader = RingReader.attach(owner.address)
    assert torch.equal(reader.read(first).features, torch.cat([early[0], features[:3]]))
    assert torch.equal(reader.read(second).features, features[5:10])
    assert torch.equal(reader.read(second).target_states, states[5:10])


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"last_hidden_states": None}, "hook failed"),
        ({"hidden_states": torch.zeros(10, 6)}, "hook failed"),
        ({"hidden_states": torch.zeros(11, 4)}, "width"),
    ],
)
def test_an_error_in_the_hook_spoils_the_slot_and_nothing_else(hook, changes, reason) -> None:
    owner, call, *_ = hook
    slot = owner.allocate(5)
    call(_Batch(["a", "b", plugin.teach_rid("main", slot, "x"), "c"]), **changes)
    assert reason in RingReader.attach(owner.address).check(slot)


def test_rows_out_of_step_with_their_positions_are_refused(hook) -> None:
    owner, call, *_ = hook
    slot = owner.allocate(5)
    batch = _Batch(["a", "b", plugin.teach_rid("main", slot, "x"), "c"])
    batch.positions = batch.positions.roll(1)
    call(batch)
    assert "other positions" in RingReader.attach(owner.address).check(slot)


def test_a_plugin_that_sglang_would_not_load_is_reported(monkeypatch) -> None:
    monkeypatch.setattr(plugin_check, "entry_points", lambda group: [])
    with pytest.raises(EngineError, match="plugin not loaded"):
        plugin_check.check_plugin()
    point = SimpleNamespace(name=plugin_check.PLUGIN_NAME)
    monkeypatch.setattr(plugin_check, "entry_points", lambda group: [point])
    monkeypatch.setenv("SGLANG_PLUGINS", "other")
    with pytest.raises(EngineError, match="SGLANG_PLUGINS"):
        plugin_check.check_plugin()
    monkeypatch.setenv("SGLANG_PLUGINS", "other, splitserve")
    plugin_check.check_plugin()


@pytest.mark.parametrize(
    "changes",
    [{"kind": "vllm"}, {"layer_ids": (2, 1)}, {"layer_ids": (0,)}, {"context_length": 0}],
)
def test_specs_that_cannot_work_are_refused(changes: dict) -> None:
    fields = {
        "target_path": "x",
        "layer_ids": (0, 1),
        "ring": RingAddress("x", RingLayout(6, 3), 1024),
    }
    EngineSpec(**fields)
    with pytest.raises(ValueError, match="allowed"):
        EngineSpec(**(fields | changes))
