"""Products of few rows against float64: on the device, or in Triton's interpreter without one."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from triton_testing import CUDA, DEVICE, copy_module, fill_with_nan, triton_module

pytest.importorskip("triton", reason="triton has no build for this platform")

ROWS = (1, 5, 8, 16)
# One program a tile, splits that do and do not divide the steps, and both by tensor maps.
CONFIGS = (
    "m16n32k64s3w4p1",
    "m16n64k128s4w4p2",
    "m16n16k64s3w2p3",
    "m16n32k64s3w4p1t",
    "m16n64k64s4w4p4t",
)


@pytest.fixture(scope="module")
def skinny() -> Iterator[ModuleType]:
    with triton_module("serving.kernels.skinny_linear") as module:
        yield module


@pytest.fixture
def nan_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    fill_with_nan(monkeypatch)


def make(
    rows: int, num_out: int, num_in: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, weight and bias, each with NaN behind its rows, and the weight behind its columns."""
    g = torch.Generator().manual_seed(seed)
    x = torch.full((rows + 40, num_in), float("nan"))
    weight = torch.full((num_out + 70, num_in + 8), float("nan"))
    bias = torch.full((num_out + 70,), float("nan"))
    x[:rows] = torch.randn(rows, num_in, generator=g)
    weight[:num_out, :num_in] = torch.randn(num_out, num_in, generator=g) / num_in**0.5
    bias[:num_out] = torch.randn(num_out, generator=g)
    x, weight, bias = (t.to(DEVICE, dtype) for t in (x, weight, bias))
    return x[:rows], weight[:num_out, :num_in], bias[:num_out]


def assert_product(
    y: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> None:
    """Half a unit in the last place of the type, and float32's rounding of the sum.

    A whole unit for bfloat16 in the interpreter, which cuts digits off where a device rounds.
    """
    units = 1.0 if y.dtype == torch.bfloat16 and not CUDA else 0.5
    x, weight = x.double(), weight.double()
    expected, size = x @ weight.T, x.abs() @ weight.abs().T
    if bias is not None:
        expected = expected + bias.double()
    allowed = torch.finfo(y.dtype).eps * units * 1.01 * expected.abs() + 2e-6 * size + 1e-6
    worst = ((y.double() - expected).abs() / allowed).max()
    # NaN is in no bound.
    assert worst <= 1.0, f"{float(worst):.2f} of what is allowed"


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("name", CONFIGS)
def test_products_equal_float64(skinny: ModuleType, nan_memory: None, name: str, rows: int) -> None:
    """100 rows and 264 columns fit no tile."""
    x, weight, bias = make(rows, 100, 264, seed=rows)
    config = skinny.Config.parse(name)
    assert_product(skinny.skinny_linear(x, weight, config=config), x, weight)
    assert_product(skinny.skinny_linear(x, weight, bias, config=config), x, weight, bias)


@pytest.mark.parametrize("name", CONFIGS)
def test_whole_tiles_and_float16(skinny: ModuleType, nan_memory: None, name: str) -> None:
    x, weight, bias = make(7, 64, 512, torch.float16)
    y = skinny.skinny_linear(x, weight, bias, config=skinny.Config.parse(name))
    assert y.dtype == torch.float16
    assert_product(y, x, weight, bias)


@pytest.mark.parametrize("name", ["m8n32k64s3w4p1", "m8n16k64s3w4p2t", "m32n32k64s3w4p2"])
def test_other_paddings(skinny: ModuleType, nan_memory: None, name: str) -> None:
    config = skinny.Config.parse(name)
    for rows in (1, config.block_m):
        x, weight, bias = make(rows, 40, 200)
        assert_product(skinny.skinny_linear(x, weight, bias, config=config), x, weight, bias)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(
    "name", ["m16n32k64s3w4p1", "m16n64k128s4w4p2", "m16n16k64s3w2p3", "m16n128k64s3w4p1"]
)
def test_a_gate_and_what_it_lets_through(
    skinny: ModuleType, nan_memory: None, name: str, rows: int
) -> None:
    """50 pairs of rows fit no tile; both products are rounded before they are used."""
    x, weight, bias = make(rows, 100, 264, torch.float16, seed=rows)
    y = skinny.skinny_linear(x, weight, config=skinny.Config.parse(name), gated=True)
    gate, up = (x.double() @ weight.double().T).half().double().chunk(2, -1)
    expected = torch.nn.functional.silu(gate) * up
    assert y.shape == (rows, 50)
    # A unit in the last place of each of the three roundings.
    torch.testing.assert_close(y.double(), expected, rtol=4e-3, atol=2e-4)
    assert "odd" in skinny.why_not(x, weight, bias, True)
    assert "odd" in skinny.why_not(x, weight[:99], None, True)


def test_parts_without_columns_and_a_single_value(skinny: ModuleType, nan_memory: None) -> None:
    for num_in in (8, 40, 72):
        x, weight, bias = make(3, 1, num_in)
        y = skinny.skinny_linear(x, weight, bias, config=skinny.Config.parse("m8n16k64s3w4p4"))
        assert_product(y, x, weight, bias)


def test_a_long_sum(skinny: ModuleType, nan_memory: None) -> None:
    x, weight, _ = make(8, 20, 12288)
    y = skinny.skinny_linear(x, weight, config=skinny.Config.parse("m8n32k512s3w4p3"))
    assert_product(y, x, weight)


@pytest.mark.parametrize("name", ["m16n32k64s3w4p1", "m16n32k64s3w4p3"])
def test_a_row_does_not_depend_on_the_others(skinny: ModuleType, name: str) -> None:
    x, weight, _ = make(16, 70, 300 // 8 * 8)
    config = skinny.Config.parse(name)
    whole = skinny.skinny_linear(x, weight, config=config)
    for rows in (1, 6):
        assert torch.equal(skinny.skinny_linear(x[:rows], weight, config=config), whole[:rows])


def test_calls_repeat_and_leave_the_counters_at_zero(skinny: ModuleType, nan_memory: None) -> None:
    x, weight, bias = make(8, 100, 512)
    config = skinny.Config.parse("m8n32k64s3w4p4")
    counters = skinny.make_counters(weight, config)
    assert counters.tolist() == [0] * 4
    results = []
    for _ in range(3):
        out = torch.full((8, 100), float("nan"), dtype=x.dtype, device=DEVICE)
        y = skinny.skinny_linear(x, weight, bias, config=config, counters=counters, out=out)
        assert y is out
        assert counters.tolist() == [0] * 4
        results.append(y)
    assert_product(results[0], x, weight, bias)
    assert all(torch.equal(results[0], y) for y in results[1:])
    assert skinny.make_counters(weight, skinny.Config.parse("m8n32k64s3w4p1")) is None


@pytest.mark.skipif(CUDA, reason="the rows lie in memory that is reserved, not had")
@pytest.mark.parametrize("name", ["m8n16k64s3w4p1", "m8n16k64s3w4p1t"])
def test_rows_beyond_two_to_the_31(skinny: ModuleType, name: str) -> None:
    """Rows 2^30 values apart: the third begins at 2^31. Only the pages that are touched exist."""
    noreserve = 0x4000
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | noreserve
    apart, num_in = 1 << 30, 128
    try:
        memory = mmap.mmap(-1, 2 * (2 * apart + num_in), flags=flags)
    except OSError as error:
        pytest.skip(f"4 GB of addresses: {error}")
    flat = torch.frombuffer(memory, dtype=torch.bfloat16)
    weight = flat.as_strided((3, num_in), (apart, 1))
    x, values, _ = make(4, 3, num_in)
    weight.copy_(values)
    assert_product(skinny.skinny_linear(x, weight, config=skinny.Config.parse(name)), x, values)


def test_what_is_refused(skinny: ModuleType) -> None:
    config = skinny.Config.parse("m8n32k64s3w4p1")
    x, weight, bias = make(4, 48, 64)
    assert skinny.why_not(x, weight, bias) == ""
    wide = torch.zeros(4, 128, dtype=x.dtype, device=DEVICE)
    for bad in (
        (x.float(), weight),
        (x, weight.float()),
        (x[:, :32], weight),
        (wide[:, :64], weight),
        (wide[:, 1:65].contiguous(), weight[:, 1:]),
        (x[:0], weight),
        (x[0], weight),
        (torch.zeros(33, 64, dtype=x.dtype, device=DEVICE), weight),
        (x, weight, bias.float()),
        (x, weight[1:], bias[1:]),
        (x, weight.T.contiguous().T),
        (x[:, :60].contiguous(), weight[:, :60]),
    ):
        assert skinny.why_not(*bad)
        with pytest.raises(ValueError, match=r"functional\.linear"):
            skinny.skinny_linear(*bad, config=config)


def test_names_of_configurations(skinny: ModuleType) -> None:
    for name in (*CONFIGS, "m8n64k128s5w4p12td", "m8n64k128s5w4p1d"):
        assert str(skinny.Config.parse(name)) == name
    for name in ("cublas", "m8n64k0s5w4p1", "m8n64k128s5w4p0"):
        with pytest.raises(ValueError, match="names no product"):
            skinny.Config.parse(name)


@pytest.mark.skipif(CUDA, reason="the other tests compile")
@pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="triton itself is made for the interpreter"
)
@pytest.mark.parametrize(
    "name",
    (
        *("m8n64k128s5w4p1", "m16n64k128s3w4p4", "m8n32k256s5w4p2t", "m16n64k128s3w4p1 gated"),
        *("m8n64k128s5w4p4td", "m16n16k256s6w4p1d", "m8n32k32s3w4p2d"),
        *("m8n32k256s5w4p1 add", "m16n64k256s4w4p2t add", "m16n64k128s3w4p1 gated normed"),
    ),
)
def test_it_compiles_for_hopper(name: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """No device is asked for; what an instruction does is not seen, that it is there is."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    skinny_linear = copy_module("serving.kernels.skinny_linear", monkeypatch)
    name, *more = name.split()
    config, kernel = skinny_linear.Config.parse(name), skinny_linear.skinny_linear_kernel
    constants = {
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_K": config.block_k,
        "SPLIT": config.split_k,
        "STAGES": config.num_stages,
        "EVEN_K": True,
        "PDL_LINES": config.pdl_lines,
        "UPCAST": False,
        "GATED": "gated" in more,
        "SUMS": 128,
        "bias_ptr": None,
    }
    types = dict.fromkeys(("x_ptr", "w_ptr", "y_ptr"), "*bf16")
    types |= dict.fromkeys(("rows", "N", "K", "w_stride"), "i32")
    if config.split_k > 1:
        types |= {"partial_ptr": "*fp32", "counter_ptr": "*i32"}
    if "add" in more:
        types |= dict.fromkeys(("residual_ptr", "gain_ptr", "h_ptr"), "*bf16")
        types["squares_ptr"] = "*fp32"
    if "normed" in more:
        types |= {"sums_ptr": "*fp32", "num_sums": "i32", "eps": "fp32"}
    if config.tma:
        types["x_desc"] = f"tensordesc<bf16[{config.block_m}, {config.block_k}]>"
        types["w_desc"] = f"tensordesc<bf16[{config.block_n}, {config.block_k}]>"
    arguments = list(kernel.arg_names)
    constants |= {key: None for key in arguments if key not in types and key not in constants}
    source = ASTSource(
        kernel,
        {key: types.get(key, "constexpr") for key in arguments},
        {(arguments.index(key),): value for key, value in constants.items()},
        {
            (place,): [["tt.divisibility", 16]]
            for place, key in enumerate(arguments)
            if key in types and key not in ("rows", "num_sums", "eps") and "desc" not in key
        },
    )
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    try:
        made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    except (FileNotFoundError, RuntimeError) as error:
        if "ptxas" in str(error) and "find" in str(error):
            pytest.skip(str(error))
        raise
    text = made.asm["ptx"]
    copies = "cp.async.bulk.tensor" if config.tma else "cp.async.cg.shared.global"
    assert copies in text and "mma" in text
    assert ("atom.global.gpu.acq_rel" in text) == (config.split_k > 1)
    assert ("griddepcontrol.wait" in text) == config.pdl
    assert made.metadata.shared <= 227 * 1024
    named = [word for word in ("normed", "add") if word in more]
    assert made.metadata.name == "_".join(["skinny_linear", *named, "kernel"])
    if named:
        # On their way before the loop begins, used behind it.
        assert text.index("ld.global") < text.index(copies)
    if config.pdl:
        wait = text.index("griddepcontrol.wait")
        assert text.index("prefetch.global.L2") < wait < text.index(copies)
        assert wait < text.index("st.global")
        # Inside the loop, behind its copies: what comes next starts when these are on their way.
        assert text.count("griddepcontrol.launch_dependents") == 1
        assert text.index(copies) < text.index("griddepcontrol.launch_dependents")
    if config.split_k > 1:
        # Parts, a barrier, the count, a barrier, the parts again.
        count = text.index("atom.global.gpu.acq_rel")
        assert "bar.sync" in text[text.index("st.global") : count]
        assert "bar.sync" in text[count : text.index("ld.global.cg")]
