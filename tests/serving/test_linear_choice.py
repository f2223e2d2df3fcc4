"""Which configuration a product of few rows runs with."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from test_skinny_linear import make
from triton_testing import CUDA, copy_module, triton_module

pytest.importorskip("triton", reason="triton has no build for this platform")


@pytest.fixture(scope="module")
def choice() -> Iterator[ModuleType]:
    kernels = "serving.kernels.skinny_linear"
    with pytest.MonkeyPatch.context() as patch, triton_module(kernels) as inner:
        # What is timed are the kernels of this name.
        patch.setitem(sys.modules, kernels, inner)
        name = "serving.kernels.linear_choice"
        yield importlib.import_module(name) if CUDA else copy_module(name, patch)


@pytest.mark.parametrize(
    "shape", [(24576, 4096), (4096, 12288), (151936, 4096), (576, 576), (9, 8)]
)
@pytest.mark.parametrize("rows", [1, 8, 9, 16, 32])
def test_candidates(choice: ModuleType, shape: tuple[int, int], rows: int) -> None:
    for tma in (False, True):
        found = choice.candidates(rows, *shape, 132, tma)
        assert 4 <= len(found) == len(set(found)) <= choice.NUM_CANDIDATES
        for config in found:
            assert config.block_m >= rows and config.shared_bytes <= 227 * 1024
            # The least that a multiprocessor needs on its way, where there is as much to read.
            assert config.split_k == 1 or config.split_k * 2 * config.block_k <= shape[1] + 512
            assert not config.pdl and (tma or not config.tma)


def test_a_ring_is_no_longer_than_the_way(choice: ModuleType) -> None:
    """A Markov head's 256 columns are one step or two."""
    for config in choice.candidates(1, 151936, 256, 132, True):
        assert config.num_stages <= 256 // config.block_k + 1


def test_candidates_fill_the_device(choice: ModuleType) -> None:
    """The first candidate of the large products leaves few multiprocessors idle."""
    for shape in ((24576, 4096), (4096, 12288), (6144, 4096), (4096, 4096), (151936, 4096)):
        config = choice.candidates(8, *shape, 132, True)[0]
        programs = config.num_tiles(shape[0]) * config.split_k
        held = 227 * 1024 // (config.shared_bytes + 1024)
        waves = -(-programs // 132) / held
        assert programs / 132 / held > 0.8 * waves, (shape, str(config))


@pytest.mark.parametrize("rows", [1, 5, 8, 16])
def test_the_librarys_product_with_a_gate(choice: ModuleType, rows: int) -> None:
    """Of 50 pairs of rows, against float64."""
    x, weight, _ = make(rows, 100, 264, torch.float16, seed=rows)
    gate, up = (x.double() @ weight.double().T).half().double().chunk(2, -1)
    expected = torch.nn.functional.silu(gate) * up
    y = choice.reference(x, weight, gated=True)
    # A unit in the last place of each of the three roundings.
    torch.testing.assert_close(y.double(), expected, rtol=4e-3, atol=2e-4)


def fixed_timer(times: dict[str, float], names: list[str]) -> Callable[[Any], list[float]]:
    """Runs each call, and gives what the test says."""

    def timer(calls: Any) -> list[float]:
        for call in calls:
            call()
        assert len(calls) == len(names)
        return [times[name] for name in names]

    return timer


@pytest.mark.parametrize(
    ("times", "chosen"),
    [
        ((10.0, 8.0, 7.0), 1),
        ((10.0, 8.0, 7.9), 0),
        ((10.0, 9.8, 11.0), None),
        ((10.0, 12.0, 9.0), 1),
    ],
)
def test_the_fastest_by_a_margin_is_chosen(
    choice: ModuleType, times: tuple[float, ...], chosen: int | None
) -> None:
    _, weight, _ = make(1, 48, 128)
    configs = [choice.Config.parse(name) for name in ("m8n16k64s3w4p1", "m8n32k64s3w4p2")]
    names = ["library", *map(str, configs)]
    state = torch.get_rng_state()
    found = choice.choose(
        weight,
        5,
        configs=configs,
        timer=fixed_timer(dict(zip(names, times, strict=True)), names),
    )
    assert torch.equal(torch.get_rng_state(), state)
    assert found.config == (None if chosen is None else configs[chosen])
    assert found.name == ("library" if chosen is None else str(configs[chosen]))
    assert list(found.microseconds) == names and not found.failed


@pytest.mark.parametrize(
    ("num_out", "num_in", "name", "then"),
    [
        # A ring for one program on each multiprocessor.
        (4096, 4096, "m8n32k256s5w4p1", "m8n32k256s7w4p1d"),
        (4096, 12288, "m8n128k128s4w4p4t", "m8n128k128s5w4p4td"),
        (6144, 4096, "m16n64k256s4w4p1t", "m16n64k256s4w4p1td"),
        # No ring is longer than the way of a program, which takes a moment only.
        (576, 576, "m8n16k256s4w4p1", "m8n16k256s4w4p1d"),
        # 384 programs where 396 fit, and 192 where 264 do.
        (24576, 4096, "m16n64k128s3w4p1", "m16n64k128s3w4p1d"),
        (6144, 4096, "m8n32k256s5w4p1", "m8n32k256s5w4p1"),
        (151936, 4096, "m16n64k128s3w4p1", "m16n64k128s3w4p1"),
    ],
)
def test_what_starts_early_does_not_crowd_together(
    choice: ModuleType, num_out: int, num_in: int, name: str, then: str
) -> None:
    assert str(choice.early(choice.Config.parse(name), num_out, num_in, 132)) == then


def test_in_a_layer_the_fastest_is_launched_early(choice: ModuleType) -> None:
    _, weight, _ = make(1, 48, 128)
    config = choice.Config.parse("m8n16k64s3w4p1")
    for times, name in (((10.0, 9.0), f"{config}d"), ((9.0, 10.0), "library")):
        timed = dict(zip(("library", str(config)), times, strict=True))
        found = choice.choose(
            *(weight, 5), configs=[config], timer=fixed_timer(timed, list(timed)), in_layer=True
        )
        assert found.name == name
        assert found.fastest == name.removesuffix("d")


def test_what_a_kernel_saves_besides_counts(choice: ModuleType) -> None:
    _, weight, _ = make(1, 48, 128)
    config = choice.Config.parse("m8n16k64s3w4p1")
    names = ["library", str(config)]
    for saves, name in ((0.0, names[0]), (1.0, names[0]), (1.5, names[1])):
        timer = fixed_timer(dict(zip(names, (10.0, 11.0), strict=True)), names)
        found = choice.choose(weight, 5, configs=[config], timer=timer, saves=saves)
        assert found.name == name
        assert found.microseconds == {names[0]: 10.0 + saves, names[1]: 11.0}


def test_what_fails_or_differs_is_not_chosen(
    choice: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, weight, _ = make(1, 48, 128)
    names = ["m8n16k64s3w4p1", "m8n32k64s3w4p1", "m8n32k128s3w4p1", "m8n64k64s3w4p1"]
    real = choice.skinny_linear

    def broken(x: torch.Tensor, *rest: Any, config: Any, **options: Any) -> torch.Tensor:
        if config.block_n == 16:
            raise RuntimeError("out of resource")
        y = real(x, *rest, config=config, **options)
        return {32: y, 64: y * 1.1}[config.block_n] * (float("nan") if config.block_k == 128 else 1)

    monkeypatch.setattr(choice, "skinny_linear", broken)
    left = ["library", names[1]]
    library = functools.partial(torch.nn.functional.linear, weight=weight)
    found = choice.choose(
        weight,
        8,
        library=library,
        configs=[choice.Config.parse(name) for name in names],
        timer=fixed_timer({"library": 2.0, names[1]: 1.0}, left),
    )
    assert found.name == names[1]
    assert set(found.failed) == {names[0], names[2], names[3]}
    assert "out of resource" in found.failed[names[0]]
