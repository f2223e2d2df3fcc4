"""Decode attention against float64: on the device, or in Triton's interpreter without one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest
import torch
from triton_testing import CUDA, DEVICE, copy_module, triton_module

pytest.importorskip("triton", reason="triton has no build for this platform")
# The interpreter computes with numpy, which speaks up about the infinities of masked lanes.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.*")

# The interpreter multiplies the bit patterns of bfloat16.
DTYPES = (torch.bfloat16, torch.float16) if CUDA else (torch.float16,)
TOLERANCE = {torch.bfloat16: 1e-2, torch.float16: 1.5e-3}
"""Of each request's error, as a part of its attention, both as root mean squares."""
KV_HEADS = 2


@pytest.fixture(scope="module")
def attention() -> Iterator[ModuleType]:
    with triton_module("serving.kernels.decode_attention") as module:
        yield module


@dataclass
class Problem:
    """Requests whose tokens lie anywhere in a pool that is NaN where nothing was written."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    table: torch.Tensor
    lengths: list[int]

    @classmethod
    def make(
        cls,
        lengths: list[int],
        q_len: int,
        group: int,
        *,
        head_dim: int = 64,
        page_size: int = 1,
        dtype: torch.dtype = DTYPES[0],
        seed: int = 0,
    ) -> Problem:
        g = torch.Generator().manual_seed(seed)
        width = max(-(-max(lengths) // page_size), 1) + 3
        free = torch.randperm(len(lengths) * width + 5, generator=g)
        shape = (len(free), page_size, KV_HEADS, head_dim)
        k, v = (torch.full(shape, float("nan"), dtype=dtype) for _ in range(2))
        # Entries past a sequence's end point out of the pool.
        table = torch.full((len(lengths), width), 1 << 30, dtype=torch.int32)
        for row, length in enumerate(lengths):
            for page in range(-(-length // page_size)):
                slot = free[row * width + page]
                held = min(page_size, length - page * page_size)
                table[row, page] = slot
                for pool in (k, v):
                    pool[slot, :held] = torch.randn(held, *shape[2:], generator=g).to(dtype)
        q = torch.randn(len(lengths) * q_len, KV_HEADS * group, head_dim, generator=g).to(dtype)
        if page_size == 1:
            k, v = k.squeeze(1), v.squeeze(1)
        return cls(*(t.to(DEVICE) for t in (q, k, v, table)), lengths)

    def run(self, attention: ModuleType, **options: Any) -> torch.Tensor:
        lengths = torch.tensor(self.lengths, dtype=torch.int32, device=DEVICE)
        return attention.decode_attention(self.q, self.k, self.v, self.table, lengths, **options)

    def expected(self, causal: bool, scale: float | None = None) -> torch.Tensor:
        """float64, one request after the other; 0 for queries that see nothing."""
        heads, head_dim = self.q.shape[1:]
        k, v = (pool.reshape(-1, KV_HEADS, head_dim).double() for pool in (self.k, self.v))
        page_size = 1 if self.k.dim() == 3 else self.k.shape[1]
        q_len = len(self.q) // len(self.lengths)
        found = []
        for row, length in enumerate(self.lengths):
            q = self.q[row * q_len : (row + 1) * q_len].double()
            position = torch.arange(length, device=DEVICE)
            slot = self.table[row, position // page_size] * page_size + position % page_size
            keys, values = (pool[slot].repeat_interleave(heads // KV_HEADS, 1) for pool in (k, v))
            score = torch.einsum("qhd,nhd->hqn", q, keys) * (scale or head_dim**-0.5)
            query = torch.arange(q_len, device=DEVICE)[:, None]
            seen = position <= length - q_len + query if causal else position >= 0 * query
            weight = torch.where(seen, score, -torch.inf).softmax(-1).nan_to_num()
            found.append(torch.einsum("hqn,nhd->qhd", weight, values))
        return torch.cat(found)

    def check(self, attention: ModuleType, causal: bool, **options: Any) -> None:
        out = self.run(attention, causal=causal, **options)
        assert out.shape == self.q.shape and out.dtype == self.q.dtype
        expected = self.expected(causal, options.get("scale"))
        for got, wanted in zip(
            out.double().chunk(len(self.lengths)), expected.chunk(len(self.lengths)), strict=True
        ):
            assert (got - wanted).norm() <= TOLERANCE[out.dtype] * wanted.norm()


@pytest.mark.parametrize("splits", [1, 3, 40])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("q_len,group", [(2, 1), (8, 4), (17, 5), (2, 5), (17, 1)])
def test_matches_float64(
    attention: ModuleType, q_len: int, group: int, causal: bool, splits: int
) -> None:
    """Lengths in one batch: the block alone, a bit more, no multiple of anything, and none."""
    problem = Problem.make([q_len, q_len + 1, 77, 0], q_len, group)
    problem.check(attention, causal, tiling=attention.Tiling(splits, 16))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_long_sequence(attention: ModuleType, head_dim: int, dtype: torch.dtype) -> None:
    problem = Problem.make([1000, 530], 8, 4, head_dim=head_dim, dtype=dtype)
    problem.check(attention, True, tiling=attention.Tiling(5, 64))


@pytest.mark.parametrize("length", [1, 15, 16, 17, 31, 32, 33, 48, 49, 64, 65])
def test_edges_of_blocks_and_parts(attention: ModuleType, length: int) -> None:
    problem = Problem.make([length], 2, 4)
    for causal in (True, False):
        problem.check(attention, causal, tiling=attention.Tiling(2, 16))


def test_queries_that_see_nothing_are_zero(attention: ModuleType) -> None:
    """A request shorter than its query tokens, and empty ones, beside a whole one."""
    problem = Problem.make([3, 0, 40], 8, 4)
    out = problem.run(attention, causal=True, tiling=attention.Tiling(4, 16))
    assert not out[:5].any() and not out[8:16].any()
    assert out[5:8].any() and out[16:].isfinite().all()
    problem.check(attention, True, tiling=attention.Tiling(4, 16))


def test_scratch_is_shared(attention: ModuleType) -> None:
    """By calls with other lengths and layers; what they left must not matter."""
    tiling = attention.Tiling(4, 16)
    pairs = 2 * KV_HEADS
    scratch = attention.Scratch.of(DEVICE, pairs, 4, 32, 64, torch.float32)
    for seed, lengths in enumerate(([60, 25], [9, 0], [33, 64], [60, 25])):
        scratch.partial.fill_(float("nan"))
        scratch.lse.fill_(float("nan"))
        Problem.make(lengths, 8, 4, seed=seed).check(attention, True, tiling=tiling)
    assert attention.Scratch.of(DEVICE, pairs, 4, 32, 64, torch.float32) is scratch


@pytest.mark.parametrize("page_size", [4, 64])
def test_pages_of_several_tokens(attention: ModuleType, page_size: int) -> None:
    problem = Problem.make([70, 11], 8, 4, page_size=page_size)
    problem.check(attention, True, tiling=attention.Tiling(3, 16))


def test_strided_inputs_and_given_output(attention: ModuleType) -> None:
    """Queries as a slice of q, k and v side by side, a pool that is a slice, an output given."""
    problem = Problem.make([50, 20], 8, 4)
    plain = problem.run(attention, causal=True)
    tokens, heads, head_dim = problem.q.shape
    wide = torch.full((tokens, heads + 2 * KV_HEADS, head_dim), float("nan"))
    wide = wide.to(problem.q)
    wide[:, :heads] = problem.q
    problem.q = wide[:, :heads]
    pools = torch.stack([problem.k, problem.v], 1)
    problem.k, problem.v = pools[:, 0], pools[:, 1]
    out = torch.full_like(plain, float("nan"))
    assert problem.run(attention, causal=True, out_THD=out) is out
    assert torch.equal(out, plain)


def test_scale(attention: ModuleType) -> None:
    Problem.make([50], 8, 4).check(attention, True, scale=0.5, tiling=attention.Tiling(2, 16))


def test_parts_in_the_type_of_the_query(attention: ModuleType) -> None:
    problem = Problem.make([90], 8, 4)
    problem.check(attention, False, tiling=attention.Tiling(4, 16, half_parts=True))


def test_one_part_needs_no_merge(attention: ModuleType) -> None:
    problem = Problem.make([40, 9], 8, 4)
    problem.check(attention, True, tiling=attention.Tiling(1, 16))
    Problem.make([16], 8, 4).check(attention, True, tiling=attention.Tiling(4, 16))


@pytest.mark.parametrize(
    "requests,kv_heads,rows,splits", [(1, 8, 32, 16), (2, 8, 28, 8), (8, 8, 32, 2), (8, 32, 8, 1)]
)
def test_one_program_for_each_multiprocessor(
    attention: ModuleType, requests: int, kv_heads: int, rows: int, splits: int
) -> None:
    tiling = attention.pick_tiling(requests, kv_heads, rows, 132)
    assert tiling.num_splits == splits
    assert splits == 1 or requests * kv_heads * splits <= 132


def test_every_number_of_rows_has_a_tiling(attention: ModuleType) -> None:
    for rows in range(1, attention.MAX_ROWS + 1):
        assert attention.padded_rows(rows) >= max(rows, 16)
        attention.pick_tiling(1, 8, rows, 132)


def test_refuses_what_it_does_not_serve(attention: ModuleType) -> None:
    problem = Problem.make([20], 2, 4)
    q, k, v = problem.q, problem.k, problem.v
    wide = torch.nn.functional.pad(k, (0, 4))[..., :64]
    for why, arguments in {
        "head size 32": (q[..., :32], k[..., :32], v[..., :32]),
        "torch.float32": (q.float(), k.float(), v.float()),
        "float8": (q, k.to(torch.float8_e4m3fn), v.to(torch.float8_e4m3fn)),
        "8 heads over 3": (q, k[:, :1].repeat(1, 3, 1), v[:, :1].repeat(1, 3, 1)),
        "query rows": (q.repeat(1, 17, 1), k, v),
        "not aligned": (q, wide, wide),
        "not contiguous": (q.transpose(1, 2).contiguous().transpose(1, 2), k, v),
    }.items():
        assert why in attention.refusal(*arguments, 1)
    assert "2 query tokens of 3" in attention.refusal(q, k, v, 3)
    assert attention.refusal(q, k, v, 1) == ""
    with pytest.raises(ValueError, match="head size"):
        problem.q = q[..., :32]
        problem.run(attention, causal=True)


def test_scratch_is_not_made_while_a_graph_is_captured(
    attention: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="outside of a CUDA graph"):
        attention.Scratch.of(torch.device("cuda"), 7, 7, 16, 64, torch.float32)


@pytest.mark.skipif(CUDA, reason="the other tests compile")
@pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="triton itself is made for the interpreter"
)
@pytest.mark.parametrize("rows", [16, 32, 64, 128])
def test_it_compiles_for_hopper(rows: int, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """No device is asked for; what an instruction does is not seen, that it is there is."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    module = copy_module("serving.kernels.decode_attention", monkeypatch)
    tiling = module.pick_tiling(1, 8, rows, 132)
    shape = {"Q_LEN": rows // 4, "GROUP": 4, "NUM_SPLITS": 16, "CHUNK": 16, "LEAST": 64}
    shape |= {"BLOCK_M": rows, "HEAD_DIM": 128, "EARLY": True}
    first = {"CAUSAL": True, "PAGE_SIZE": 1, "SAME_STRIDES": True, "AHEAD": 256}
    first |= {"BLOCK_N": tiling.block_n}
    types = dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "out_ptr"), "*bf16")
    types |= {"partial_ptr": "*fp32", "lse_ptr": "*fp32", "scale_log2": "fp32"}
    types |= dict.fromkeys(("table_ptr", "lengths_ptr"), "*i32")

    def compiled(kernel: Any, constants: dict[str, Any], **options: int) -> Any:
        names = list(kernel.arg_names)
        source = ASTSource(
            kernel,
            {key: "constexpr" if key in constants else types.get(key, "i32") for key in names},
            {(names.index(key),): value for key, value in constants.items()},
            {
                (place,): [["tt.divisibility", 16]]
                for place, key in enumerate(names)
                if key not in constants and not key.startswith(("num_", "scale"))
            },
        )
        try:
            return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
        except (FileNotFoundError, RuntimeError) as error:
            if "ptxas" in str(error) and "find" in str(error):
                pytest.skip(str(error))
            raise

    stages = {"num_warps": tiling.num_warps, "num_stages": tiling.num_stages}
    made = compiled(module.decode_attention_kernel, shape | first, **stages)
    assert made.metadata.shared <= 227 * 1024
    text = made.asm["ptx"]
    # Both products take keys and values from shared memory as they came.
    assert "wgmma.mma_async" in text and "mma.sync" not in text and "ldmatrix" not in text
    wait = text.index("griddepcontrol.wait")
    assert text.index("prefetch.global.L2") < wait < text.index("cp.async.cg.shared.global")
    assert wait < text.index("griddepcontrol.launch_dependents")
    merged = compiled(module.merge_attention_kernel, shape | {"PARTS": 16}, num_warps=1)
    text = merged.asm["ptx"]
    assert merged.metadata.shared == 0 and "bar.sync" not in text
    assert text.index("griddepcontrol.launch_dependents") < text.index("griddepcontrol.wait")


@pytest.mark.skipif(not CUDA, reason="the interpreter runs one program after the other")
def test_launches_that_overlap_give_the_same_bits(attention: ModuleType) -> None:
    """Many layers in one graph, replayed at other lengths, each begun before the last has ended."""
    problem = Problem.make([4000, 1777], 8, 4, head_dim=128)
    lengths = torch.tensor(problem.lengths, dtype=torch.int32, device=DEVICE)
    arguments = (problem.q, problem.k, problem.v, problem.table, lengths)
    tilings = [attention.Tiling(8, early=False), attention.Tiling(8, ahead=256)]
    for tiling in tilings:
        attention.decode_attention(*arguments, causal=True, tiling=tiling)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        first, *others = [
            attention.decode_attention(*arguments, causal=True, tiling=tilings[layer > 0])
            for layer in range(33)
        ]
    for step in range(200):
        lengths.copy_(torch.tensor([4000 - 13 * step, 8 + 7 * step], device=DEVICE))
        graph.replay()
        for out in others:
            assert torch.equal(out, first)
