"""The hook serves what the kernel can, stores what SGLang stores, and stays away from the rest."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_launch import sglang_folder

from serving import hooks_attention
from serving.hooks_attention import DecodeAttention

pytest.importorskip("triton", reason="triton has no build for this platform")
decode_attention = pytest.importorskip("serving.kernels.decode_attention")

REQUESTS, Q_LEN, HEADS, KV_HEADS, HEAD_DIM, SLOTS = 2, 8, 8, 2, 64, 40
ORIGINAL = torch.full((REQUESTS * Q_LEN, HEADS * HEAD_DIM), 7.0)


class Pool:
    """Notes what is stored, and where."""

    def __init__(self) -> None:
        self.keys, self.values = (
            torch.zeros(SLOTS, KV_HEADS, HEAD_DIM, dtype=torch.bfloat16) for _ in range(2)
        )
        self.stored: list[tuple[Any, ...]] = []

    def set_kv_buffer(self, *arguments: Any) -> None:
        self.stored.append(arguments)


class Backend:
    """As FlashAttention's is for a chain of drafts on a plain pool."""

    topk = 1
    use_mla = False
    is_encoder_decoder = False
    use_sliding_window_kv_pool = False
    local_attn_builder = None
    num_splits = 0
    fa_skip_kv_cache = False
    _kv_shard_pool = None
    attn_cp_size = 1
    page_size = 1

    def __init__(self) -> None:
        self.kv_index_translator = SimpleNamespace(is_translating=False)
        self.token_to_kv_pool = Pool()
        self.forward_metadata = SimpleNamespace(
            page_table=torch.zeros(REQUESTS, 20, dtype=torch.int32),
            cache_seqlens_int32=torch.full((REQUESTS,), 12, dtype=torch.int32),
            max_seq_len_q=Q_LEN,
            image_token_ranges=None,
            swa_spec_metadata=None,
            swa_out_cache_loc=None,
        )

    def get_paged_mha_kv_cache(self, layer: Any) -> tuple[torch.Tensor, torch.Tensor]:
        pool = self.token_to_kv_pool
        return pool.keys.unsqueeze(1), pool.values.unsqueeze(1)


class Case:
    """A call of `forward_extend` in a verification."""

    def __init__(self) -> None:
        self.hook = DecodeAttention()
        self.backend = Backend()
        self.layer = SimpleNamespace(
            sliding_window_size=-1,
            is_cross_attention=False,
            logit_cap=0.0,
            tp_q_head_num=HEADS,
            head_dim=HEAD_DIM,
            scaling=0.125,
            attn_type=SimpleNamespace(name="DECODER"),
            k_scale=None,
            v_scale=None,
        )
        self.batch = SimpleNamespace(
            forward_mode=SimpleNamespace(is_target_verify=lambda: True),
            spec_info=SimpleNamespace(ragged_verify_layout=None),
            out_cache_loc=torch.arange(REQUESTS * Q_LEN),
            out_cache_loc_is_physical=False,
            _attn_output=None,
        )
        qkv = torch.zeros(REQUESTS * Q_LEN, (HEADS + 2 * KV_HEADS) * HEAD_DIM, dtype=torch.bfloat16)
        self.q, k, v = qkv.split([n * HEAD_DIM for n in (HEADS, KV_HEADS, KV_HEADS)], 1)
        self.k, self.v = (t.view(-1, KV_HEADS, HEAD_DIM) for t in (k, v))
        self.keywords: dict[str, Any] = {}
        self.original_calls: list[tuple[Any, ...]] = []

    def run(self, *, save: bool = True) -> torch.Tensor:
        def original(*arguments: Any, **keywords: Any) -> torch.Tensor:
            self.original_calls.append((*arguments, keywords))
            return ORIGINAL

        return self.hook.around_forward(
            original,
            *(self.backend, self.q, self.k, self.v, self.layer, self.batch, save),
            **self.keywords,
        )


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> list[SimpleNamespace]:
    """The calls of the kernel, which is not run: it is not interpreted here."""
    calls: list[SimpleNamespace] = []

    def run(*tensors: torch.Tensor, **options: Any) -> torch.Tensor:
        calls.append(SimpleNamespace(tensors=tensors, **options))
        out = options["out_THD"]
        return torch.ones(tensors[0].shape) if out is None else out.fill_(1.0)

    monkeypatch.setattr(decode_attention, "decode_attention", run)
    return calls


@pytest.fixture
def case(monkeypatch: pytest.MonkeyPatch) -> Case:
    monkeypatch.setattr(
        hooks_attention,
        "save",
        lambda backend, layer, batch, k, v: backend.token_to_kv_pool.set_kv_buffer(k, v),
    )
    return Case()


def test_a_verification_is_served(
    case: Case, kernel: list[SimpleNamespace], caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(3):
        out = case.run()
    assert out.shape == ORIGINAL.shape and (out == 1.0).all() and not case.original_calls
    q, k, v, table, lengths = kernel[0].tensors
    assert q.shape == (REQUESTS * Q_LEN, HEADS, HEAD_DIM)
    # The slice itself, not a copy of it.
    assert q.data_ptr() == case.q.data_ptr() and q.stride(0) == case.q.stride(0)
    assert k.shape == v.shape == (SLOTS, 1, KV_HEADS, HEAD_DIM)
    metadata = case.backend.forward_metadata
    assert table is metadata.page_table and lengths is metadata.cache_seqlens_int32
    assert kernel[0].causal and kernel[0].scale == 0.125
    assert len(case.backend.token_to_kv_pool.stored) == 3
    lines = [r.getMessage() for r in caplog.records]
    assert lines == ["kernels: decode attention is active, causal, 8 query tokens a request"]
    assert hooks_attention.LOG_MARK in lines[0]


@pytest.mark.parametrize("kind", ["ENCODER_ONLY", "DECODER_BIDIRECTIONAL"])
def test_a_drafts_block_sees_itself(case: Case, kernel: list[SimpleNamespace], kind: str) -> None:
    case.layer.attn_type = SimpleNamespace(name=kind)
    case.run()
    assert kernel[0].causal is False and not case.original_calls


def test_keys_and_values_are_stored_as_asked(case: Case, kernel: list[SimpleNamespace]) -> None:
    case.run(save=False)
    assert not case.backend.token_to_kv_pool.stored
    case.k = case.v = None
    case.run()
    assert not case.backend.token_to_kv_pool.stored and len(kernel) == 2


def test_the_given_output_is_written(case: Case, kernel: list[SimpleNamespace]) -> None:
    case.batch._attn_output = torch.zeros(REQUESTS * Q_LEN, HEADS * HEAD_DIM)
    out = case.run()
    assert out.data_ptr() == case.batch._attn_output.data_ptr() and (out == 1.0).all()


def test_other_modes_pass_in_silence(
    case: Case, kernel: list[SimpleNamespace], caplog: pytest.LogCaptureFixture
) -> None:
    case.batch.forward_mode.is_target_verify = lambda: False
    case.keywords = {"sinks": None, "return_lse": True}
    assert case.run(save=False) is ORIGINAL
    *arguments, keywords = case.original_calls[0]
    assert arguments[0] is case.backend and arguments[1] is case.q and arguments[-1] is False
    assert keywords == case.keywords and not kernel and not caplog.records


REFUSED: dict[str, tuple[str, str, Any]] = {
    "a tree of drafts": ("backend", "topk", 4),
    "latent attention": ("backend", "use_mla", True),
    "with sinks": ("keywords", "sinks", torch.ones(1)),
    "with return_lse": ("keywords", "return_lse", True),
    "an encoder": ("layer", "is_cross_attention", True),
    "encoder": ("backend", "is_encoder_decoder", True),
    "a sliding-window pool": ("backend", "use_sliding_window_kv_pool", True),
    "a sliding window": ("layer", "sliding_window_size", 512),
    "local attention": ("backend", "local_attn_builder", object()),
    "capped logits": ("layer", "logit_cap", 30.0),
    "deterministic inference": ("backend", "num_splits", 1),
    "no KV cache": ("backend", "fa_skip_kv_cache", True),
    "a sharded pool": ("backend", "_kv_shard_pool", object()),
    "context parallelism": ("backend", "attn_cp_size", 2),
    "a translated pool": (
        "backend",
        "kv_index_translator",
        SimpleNamespace(is_translating=True),
    ),
    "ragged verify windows": (
        "batch",
        "spec_info",
        SimpleNamespace(ragged_verify_layout=object()),
    ),
    "image masks": ("metadata", "image_token_ranges", torch.ones(1)),
    "window": ("metadata", "swa_spec_metadata", object()),
    "no int32 page table": ("metadata", "page_table", torch.zeros(2, 4, dtype=torch.int64)),
    "not contiguous": (
        "metadata",
        "page_table",
        torch.zeros(4, 2, dtype=torch.int32).t(),
    ),
    "more than 8 requests": (
        "metadata",
        "cache_seqlens_int32",
        torch.zeros(9, dtype=torch.int32),
    ),
    "rows that belong to no request": ("metadata", "max_seq_len_q", 7),
    "head size 32": ("layer", "head_dim", 32),
    "torch.float8_e4m3fn": (
        "pool",
        "keys",
        torch.zeros(SLOTS, KV_HEADS, HEAD_DIM).to(torch.float8_e4m3fn),
    ),
}


@pytest.mark.parametrize("why", REFUSED)
def test_the_rest_is_left_to_sglang(
    case: Case, kernel: list[SimpleNamespace], caplog: pytest.LogCaptureFixture, why: str
) -> None:
    owner, name, value = REFUSED[why]
    if owner == "keywords":
        case.keywords[name] = value
    else:
        backend = case.backend
        places = {
            "backend": backend,
            "layer": case.layer,
            "batch": case.batch,
            "metadata": backend.forward_metadata,
            "pool": backend.token_to_kv_pool,
        }
        setattr(places[owner], name, value)
    for _ in range(2):
        assert case.run() is ORIGINAL
    # SGLang stores keys and values itself then.
    assert not case.backend.token_to_kv_pool.stored and not kernel
    (line,) = [r.getMessage() for r in caplog.records]
    assert line.startswith("kernels: attention stays as it is") and why in line


def test_one_refused_layer_leaves_the_others_served(
    case: Case, kernel: list[SimpleNamespace]
) -> None:
    plain = case.layer
    case.layer = copy.copy(plain)
    case.layer.sliding_window_size = 512
    case.run()
    case.layer = plain
    case.run()
    assert len(kernel) == 1 and len(case.original_calls) == 1 and not case.hook.failed


def test_a_failure_ends_it_for_good(
    case: Case, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    calls = []

    def fail(*_: Any, **__: Any) -> None:
        calls.append(1)
        raise RuntimeError("no such instruction")

    monkeypatch.setattr(decode_attention, "decode_attention", fail)
    for _ in range(3):
        assert case.run() is ORIGINAL
    assert calls == [1] and len(case.original_calls) == 3
    (line,) = [r.getMessage() for r in caplog.records]
    assert line == "kernels: decode attention is left out: no such instruction"


def test_stores_as_sglang_does() -> None:
    sglang_folder()
    memory_pool = pytest.importorskip("sglang.srt.mem_cache.memory_pool")
    case = Case()
    case.layer.k_scale = 0.5
    hooks_attention.save(case.backend, case.layer, case.batch, case.k, case.v)
    ((layer, where, k, v, k_scale, v_scale),) = case.backend.token_to_kv_pool.stored
    assert layer is case.layer and k is case.k and v is case.v
    assert (k_scale, v_scale) == (0.5, None)
    assert isinstance(where, memory_pool.KVWriteLoc)
    assert where.loc is case.batch.out_cache_loc and where.swa_loc is None


def test_the_attention_types_are_those_of_sglang() -> None:
    sglang_folder()
    radix_attention = pytest.importorskip("sglang.srt.layers.radix_attention")
    causal = {
        kind.name: hooks_attention.is_causal(SimpleNamespace(attn_type=kind))
        for kind in radix_attention.AttentionType
    }
    assert causal == {"DECODER": True, "DECODER_BIDIRECTIONAL": False, "ENCODER_ONLY": False}


def test_the_hooked_method_has_these_arguments() -> None:
    """The backend cannot be imported without a GPU's libraries, so its source is read."""
    import ast

    module, _, name = hooks_attention.FORWARD.rpartition(".")[0].rpartition(".")
    path = sglang_folder() / "/".join(module.split(".")[1:])
    tree = ast.parse(path.with_suffix(".py").read_text())
    (backend,) = [n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == name]
    methods = {n.name: n for n in backend.body if isinstance(n, ast.FunctionDef)}
    names = [a.arg for a in methods["forward_extend"].args.args]
    assert names[:7] == ["self", "q", "k", "v", "layer", "forward_batch", "save_kv_cache"]
    fields = {
        node.attr
        for method in methods.values()
        for node in ast.walk(method)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
    }
    known = fields | {n.target.id for n in backend.body if isinstance(n, ast.AnnAssign)}
    read = {name for name in vars(Backend) if not name.startswith("__")} - set(methods)
    assert read <= known


def test_registers_one_hook() -> None:
    seen: list[tuple[Any, ...]] = []
    kind = SimpleNamespace(AROUND="around")
    hooks_attention.register(lambda *arguments: seen.append(arguments), kind)
    ((target, hook, how),) = seen
    assert target == hooks_attention.FORWARD and how == "around"
    assert hook.__func__ is DecodeAttention.around_forward
