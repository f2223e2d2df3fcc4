"""The hook takes verifications of plain layers, and leaves the rest to SGLang."""

from __future__ import annotations

import inspect
import pkgutil
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_launch import sglang_folder

from serving import hooks_rope
from serving.hooks_rope import RopeStore

pytest.importorskip("triton", reason="triton has no build for this platform")
rope_store = pytest.importorskip("serving.kernels.rope_store")

TOKENS, HEADS, KV_HEADS, HEAD_DIM, SLOTS = 8, 4, 2, 64, 40
WIDTH = (HEADS + 2 * KV_HEADS) * HEAD_DIM
ORIGINAL = torch.full((TOKENS, 16), 7.0)
ROTATES = hooks_rope.rotates_by_table


class FlashAttentionBackend:
    """Named as SGLang's."""

    def __init__(self) -> None:
        self.token_to_kv_pool = Pool()


class Pool:
    def __init__(self) -> None:
        self.keys = torch.zeros(SLOTS, KV_HEADS, HEAD_DIM, dtype=torch.bfloat16)

    def get_key_buffer(self, layer: int) -> torch.Tensor:
        assert layer == 3
        return self.keys

    get_value_buffer = get_key_buffer


class RMSNorm:
    """Named as SGLang's."""

    cast_x_before_out_mul = False
    variance_size_override = None
    variance_epsilon = 1e-6
    weight = torch.ones(HEAD_DIM, dtype=torch.bfloat16)


class Layer:
    """As an attention layer of SGLang's; notes what its attention is given."""

    def __init__(self, normed: bool = True) -> None:
        self.attended: list[Any] = []
        self.attn = Attention(self.attended)
        self.rotary_emb = SimpleNamespace(
            is_neox_style=True, cos_sin_cache=torch.zeros(50, HEAD_DIM)
        )
        if normed:
            self.q_norm, self.k_norm = RMSNorm(), RMSNorm()

    def qkv_proj(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        return torch.ones(len(x), WIDTH, dtype=torch.bfloat16), None

    def o_proj(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        return x * 2, None


class Attention:
    layer_id = 3
    is_cross_attention = False

    def __init__(self, attended: list[Any]) -> None:
        self.attended = attended

    def __call__(self, q: Any, k: Any, v: Any, batch: Any, save_kv_cache: bool) -> Any:
        assert k is None and v is None and not save_kv_cache
        self.attended.append(q)
        return q


class Qwen3Attention(Layer):
    """Named as SGLang's."""


class LlamaAttention(Layer):
    """Named as SGLang's."""

    def __init__(self) -> None:
        super().__init__(normed=False)


class Other(Qwen3Attention):
    """A subclass, which may do other things."""


@pytest.fixture(autouse=True)
def server(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """What the hook asks SGLang about, and the kernel's calls."""
    made = SimpleNamespace(
        backend=FlashAttentionBackend(), plain=True, deterministic=False, by_table=True, calls=[]
    )

    def store(qkv: torch.Tensor, *rest: Any, norms: Any, eps: float) -> torch.Tensor:
        made.calls.append((norms, eps))
        return qkv[:, : HEADS * HEAD_DIM] + 1

    monkeypatch.setattr(hooks_rope, "attention_backend", lambda: made.backend)
    monkeypatch.setattr(hooks_rope, "is_plain_store", lambda batch: made.plain)
    monkeypatch.setattr(hooks_rope, "is_deterministic", lambda: made.deterministic)
    monkeypatch.setattr(hooks_rope, "rotates_by_table", lambda rotary: made.by_table)
    monkeypatch.setattr(rope_store, "rope_store", store)
    return made


def batch(verify: bool = True, slots: int = TOKENS) -> Any:
    mode = SimpleNamespace(is_target_verify=lambda: verify)
    return SimpleNamespace(forward_mode=mode, out_cache_loc=torch.arange(slots))


def run(hook: RopeStore, layer: Any, given: Any, tokens: int = TOKENS) -> bool:
    """Whether the kernel's queries were attended to."""

    def original(got: Any, positions: Any, x: Any, got_batch: Any) -> torch.Tensor:
        assert got is layer and got_batch is given
        return ORIGINAL

    before = len(layer.attended)
    x = torch.zeros(tokens, 16, dtype=torch.bfloat16)
    out = hook.around_forward(original, layer, torch.arange(tokens), x, given)
    if out is ORIGINAL:
        assert len(layer.attended) == before
        return False
    assert torch.equal(out, torch.full_like(out, 4.0)) and len(layer.attended) == before + 1
    return True


def test_verification_is_served(server: SimpleNamespace, caplog: pytest.LogCaptureFixture) -> None:
    hook, layer = RopeStore(), Qwen3Attention()
    assert run(hook, layer, batch()) and run(hook, layer, batch())
    assert run(hook, LlamaAttention(), batch())
    (norms, eps), _, (none, zero) = server.calls
    assert eps == 1e-6 and norms[0] is RMSNorm.weight and none is None and zero == 0.0
    assert [record.getMessage() for record in caplog.records] == [
        "kernels: rope is active for Qwen3Attention",
        "kernels: rope is active for LlamaAttention",
    ]


def test_the_rest_stays(server: SimpleNamespace, caplog: pytest.LogCaptureFixture) -> None:
    hook, layer = RopeStore(), Qwen3Attention()
    assert not run(hook, layer, batch(verify=False))
    assert not run(hook, layer, batch(slots=200), tokens=200)
    assert not run(hook, layer, batch(slots=TOKENS + 1))
    assert not run(hook, Other(), batch())
    for name, value in (("plain", False), ("deterministic", True), ("by_table", False)):
        before = getattr(server, name)
        setattr(server, name, value)
        assert not run(hook, layer, batch())
        setattr(server, name, before)
    server.backend, before = SimpleNamespace(), server.backend
    assert not run(hook, layer, batch())
    server.backend = before
    for name, value in (("cast_x_before_out_mul", True), ("variance_epsilon", 1e-5)):
        other = Qwen3Attention()
        setattr(other.k_norm, name, value)
        assert not run(hook, other, batch())
    other = Qwen3Attention()
    other.rotary_emb.is_neox_style = False
    assert not run(hook, other, batch())
    other = Qwen3Attention()
    other.rotary_emb.cos_sin_cache = torch.zeros(50, HEAD_DIM // 2)
    assert not run(hook, other, batch())
    assert not server.calls and run(hook, layer, batch())
    assert "rope stays as it is: part of a head is rotated" in caplog.text


def test_a_kernel_that_fails_is_left_for_good(
    server: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("too many resources")

    hook, layer = RopeStore(), Qwen3Attention()
    with monkeypatch.context() as patch:
        patch.setattr(rope_store, "rope_store", broken)
        assert not run(hook, layer, batch())
    assert hook.failed and not run(hook, layer, batch())
    assert "rope is left out: too many resources" in caplog.text


def test_sglang_is_as_the_hook_takes_it() -> None:
    folder = sglang_folder()
    pytest.importorskip("sglang.srt.models.qwen3")
    for target in hooks_rope.FORWARDS:
        forward = pkgutil.resolve_name(target)
        names = list(inspect.signature(forward).parameters)
        assert names == ["self", "positions", "hidden_states", "forward_batch"]
        assert pkgutil.resolve_name(target.rpartition(".")[0]).__name__ in hooks_rope.CLASSES
    from sglang.srt.mem_cache import memory_pool

    assert hasattr(memory_pool.MHATokenToKVPool, "is_quantized_kv_cache")
    for path, text in (
        ("srt/layers/attention/flashattention_backend.py", "class FlashAttentionBackend("),
        ("srt/models/utils.py", "cache_loc=forward_batch.out_cache_loc"),
        ("srt/layers/layernorm.py", "None if var_hidden_size == hidden_size else var_hidden_size"),
    ):
        assert text in (folder / path).read_text()


def test_rotations() -> None:
    sglang_folder()
    base = pytest.importorskip("sglang.srt.layers.rotary_embedding.base")

    def made(kind: type, **attributes: Any) -> Any:
        rotary = kind.__new__(kind)
        torch.nn.Module.__init__(rotary)
        plain = {"use_fallback_kernel": False, "_force_native": False}
        for name, value in {**plain, "rotary_dim": 64, "head_size": 64, **attributes}.items():
            setattr(rotary, name, value)
        return rotary

    class Scaled(base.RotaryEmbedding):
        """Another table."""

    class Sections(base.RotaryEmbedding):
        """Another kernel."""

        def forward_cuda(self, *_: Any) -> None:
            raise AssertionError

    rotates = ROTATES
    assert rotates(made(base.RotaryEmbedding)) and rotates(made(Scaled))
    assert not rotates(made(Sections))
    assert not rotates(made(base.RotaryEmbedding, use_fallback_kernel=True))
    assert not rotates(made(base.RotaryEmbedding, _force_native=True))
    assert not rotates(made(base.RotaryEmbedding, rotary_dim=32))
    assert not rotates(SimpleNamespace())
