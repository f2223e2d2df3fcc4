"""Which products the hooks serve, with kernels, layers and a GPU that are made up."""

from __future__ import annotations

import inspect
import json
import logging
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from test_launch import sglang_folder
from torch.nn import functional as F

from serving import hooks_linear, hooks_norm
from serving.hooks_linear import KeptChoices, Products, Shape, is_plain_head

WEIGHT = torch.randn(24, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
SHAPE = Shape(24, 16, 8, "bfloat16", False)


class Config(NamedTuple):
    name: str
    split_k: int

    @classmethod
    def parse(cls, name: str) -> Config:
        found = re.fullmatch(r"p(\d)", name)
        if not found:
            raise ValueError(f"{name!r} names no product")
        return cls(name, int(found[1]))


class Kernels:
    """In place of skinny_linear and linear_choice: products one too large, so that they show."""

    Config = Config

    def __init__(self, choice: str = "p1") -> None:
        self.choice = choice
        self.chosen: list[tuple[tuple[int, ...], int]] = []
        self.counters: list[Any] = []
        self.error: Exception | None = None

    def choose(
        self,
        weight: Any,
        rows: int,
        *,
        library: Any,
        bias: Any,
        gated: bool,
        saves: float,
        in_layer: bool,
    ) -> Any:
        assert saves == 0.0 and not in_layer
        self.chosen.append((tuple(weight.shape), rows))
        x = torch.ones(rows, weight.shape[1], dtype=weight.dtype)
        assert torch.equal(library(x), plain(x, weight, bias, gated))
        return SimpleNamespace(
            name=self.choice,
            fastest=self.choice,
            microseconds={"p3": 6.0, "p1": 7.0, self.choice: 4.0, "library": 5.0},
            failed={"p9": "out of resource"},
        )

    def why_not(self, x: Any, weight: Any, bias: Any, gated: bool, *, normed: Any, add: Any) -> str:
        assert normed is None and add is None
        return "" if x.is_contiguous() else "rows with gaps"

    def make_counters(self, weight: Any, config: Config) -> torch.Tensor:
        return torch.zeros(1)

    def skinny_linear(
        self,
        x: Any,
        weight: Any,
        bias: Any,
        *,
        config: Config,
        counters: Any,
        gated: bool,
        normed: Any,
    ) -> torch.Tensor:
        self.counters.append(counters)
        if self.error:
            raise self.error
        return plain(x, weight, bias, gated) + 1


def plain(x: Any, weight: Any, bias: Any = None, gated: bool = False) -> torch.Tensor:
    y = F.linear(x, weight, bias)
    return SiluAndMul()(y) if gated else y


class SiluAndMul:
    """Named as SGLang's."""

    def __call__(self, y: torch.Tensor) -> torch.Tensor:
        gate, up = y.chunk(2, -1)
        return F.silu(gate) * up


class Gpu:
    """What the hooks ask the device about."""

    capturing = False
    batch_invariant = False


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpu]:
    made = Gpu()
    monkeypatch.setattr(hooks_linear, "is_on_gpu", lambda x: True)
    monkeypatch.setattr(hooks_linear, "is_capturing", lambda: made.capturing)
    monkeypatch.setattr(hooks_linear, "is_batch_invariant", lambda: made.batch_invariant)
    yield made


def make_products(choice: str = "p1", path: Path | None = None) -> tuple[Products, Kernels]:
    products = Products(KeptChoices(path))
    products.kernels = products.choice = kernels = Kernels(choice)
    return products, kernels


def apply(products: Products, x: Any, weight: Any = WEIGHT, bias: Any = None) -> bool:
    """Whether a layer's product was a kernel's."""
    layer, method = SimpleNamespace(weight=weight), object()

    def original(got_method: Any, got_layer: Any, x: Any, bias: Any = None) -> Any:
        assert got_method is method and got_layer is layer
        return F.linear(x, weight, bias)

    y = products.linear(original, method, layer, x, bias)
    plain = F.linear(x, weight, bias)
    if torch.equal(y, plain):
        return False
    assert torch.equal(y, plain + 1)
    return True


def rows(number: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.ones(number, 16, dtype=dtype)


def test_few_rows_are_served_and_a_shape_is_timed_once() -> None:
    products, kernels = make_products()
    assert [apply(products, rows(number)) for number in (1, 8, 5)] == [True] * 3
    assert kernels.chosen == [((24, 16), 8)]
    assert apply(products, rows(9)) and apply(products, rows(16))
    assert kernels.chosen[1:] == [((24, 16), 16)]
    assert apply(products, rows(8), WEIGHT + 1)
    assert len(kernels.chosen) == 2
    bias = torch.ones(24, dtype=torch.bfloat16)
    assert apply(products, rows(8), WEIGHT, bias)
    assert apply(products, rows(8, torch.float16), WEIGHT.half())
    assert len(kernels.chosen) == 4
    assert kernels.counters == [None] * 8


class Subclass(torch.Tensor):
    """A quantized weight that calls itself bfloat16."""


@pytest.mark.parametrize(
    ("x", "weight"),
    [
        (rows(17), WEIGHT),
        (rows(0), WEIGHT),
        (rows(4).unsqueeze(0), WEIGHT),
        (rows(4, torch.float32), WEIGHT.float()),
        (rows(4), WEIGHT.as_subclass(Subclass)),
        (rows(4), WEIGHT.clone().requires_grad_()),
        (rows(4)[0], WEIGHT),
    ],
)
def test_other_products_stay_sglangs(x: torch.Tensor, weight: torch.Tensor) -> None:
    products, kernels = make_products()
    assert not apply(products, x, weight)
    assert not kernels.chosen and not products.plans


def test_a_parameter_is_a_weight() -> None:
    products, _ = make_products()
    assert apply(products, rows(4), torch.nn.Parameter(WEIGHT, requires_grad=False))


def test_nothing_off_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    products, kernels = make_products()
    assert not apply(products, rows(4)) and not kernels.chosen


def test_one_call_with_gaps_is_sglangs_and_the_next_is_not() -> None:
    products, _ = make_products()
    assert not apply(products, torch.ones(16, 4, dtype=torch.bfloat16).T)
    assert apply(products, rows(4))


def test_the_library_can_be_the_choice(caplog: pytest.LogCaptureFixture) -> None:
    products, kernels = make_products("library")
    assert not apply(products, rows(4)) and not apply(products, rows(4))
    assert len(kernels.chosen) == 1
    assert "kernels: 24x16 up to 8 rows bfloat16: library 5.0 us, p3 6.0 us" in caplog.text


def test_the_choice_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    products, _ = make_products()
    apply(products, rows(4))
    assert "kernels: 24x16 up to 8 rows bfloat16: p1 4.0 us, library 5.0 us" in caplog.text
    assert "p9 is left out: out of resource" in caplog.text
    assert all(record.message.startswith(hooks_linear.LOG_MARK) for record in caplog.records)


def test_nothing_is_timed_in_a_capture(gpu: Gpu) -> None:
    products, kernels = make_products()
    gpu.capturing = True
    assert not apply(products, rows(4)) and not kernels.chosen
    gpu.capturing = False
    assert apply(products, rows(4))
    gpu.capturing = True
    assert apply(products, rows(4))


def test_each_weight_has_counters_made_outside_of_captures(gpu: Gpu) -> None:
    products, kernels = make_products("p2")
    other = WEIGHT + 1
    assert apply(products, rows(4))
    gpu.capturing = True
    assert apply(products, rows(4)) and not apply(products, rows(4), other)
    gpu.capturing = False
    assert apply(products, rows(4), other)
    first, second, third = kernels.counters
    assert first is second and first is not third and third is not None


def test_a_kernel_that_fails_is_left_for_good(caplog: pytest.LogCaptureFixture) -> None:
    products, kernels = make_products()
    assert apply(products, rows(4))
    kernels.error = RuntimeError("too many resources")
    assert not apply(products, rows(4))
    kernels.error = None
    assert not apply(products, rows(4))
    assert "kernels: 24x16 up to 8 rows bfloat16 stays SGLang's: RuntimeError" in caplog.text
    assert apply(products, rows(12))


def test_a_choice_that_fails_is_not_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    products, kernels = make_products()

    def out_of_memory(*_: Any, **__: Any) -> Any:
        kernels.chosen.append(((), 0))
        raise torch.OutOfMemoryError("240 MiB")

    monkeypatch.setattr(kernels, "choose", out_of_memory)
    assert not apply(products, rows(4)) and not apply(products, rows(4))
    assert len(kernels.chosen) == 1


def test_batch_invariant_operators_stay(gpu: Gpu) -> None:
    products, kernels = make_products()
    gpu.batch_invariant = True
    assert not apply(products, rows(4)) and not kernels.chosen


def test_a_file_repeats_the_choices(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "choices.jsonl"
    first, kernels = make_products("p2", path)
    assert apply(first, rows(4)) and apply(first, rows(12))
    again, others = make_products("p1", path)
    assert apply(again, rows(4)) and apply(again, rows(12))
    assert not others.chosen and len(kernels.chosen) == 2
    assert again.plans[SHAPE].config == Config("p2", 2)
    assert f"p2, from {path}" in caplog.text
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines[0] == {**SHAPE._asdict(), "choice": "p2"}


def test_ranks_agree_on_what_was_written_first(tmp_path: Path) -> None:
    path = tmp_path / "choices.jsonl"
    one, _ = make_products("p1", path)
    two, _ = make_products("p2", path)
    assert apply(one, rows(4)) and apply(two, rows(4))
    assert two.plans[SHAPE].config == one.plans[SHAPE].config == Config("p1", 1)


def test_a_file_may_name_the_library_or_nonsense(tmp_path: Path) -> None:
    path = tmp_path / "choices.jsonl"
    for name in ("library", "cublas"):
        path.write_text(json.dumps({**SHAPE._asdict(), "choice": name}) + "\n")
        products, kernels = make_products("p1", path)
        assert not apply(products, rows(4)) and not kernels.chosen


@pytest.mark.parametrize("text", ["{", "[]", '{"choice": "p1"}', '{"num_out": 1}', '{"choice": 1}'])
def test_other_files_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "choices.jsonl"
    path.write_text(text + "\n")
    with pytest.raises(ValueError, match=r"choices\.jsonl is no file of choices"):
        KeptChoices(path)


class UnquantizedEmbeddingMethod:
    """Named as SGLang's."""


class Fp8LinearMethod:
    """An lm_head's that is quantized."""


def make_head(**attributes: Any) -> SimpleNamespace:
    return SimpleNamespace(
        **{"weight": WEIGHT, "quant_method": UnquantizedEmbeddingMethod(), **attributes}
    )


def make_processor(**attributes: Any) -> SimpleNamespace:
    plain = {"use_fp32_lm_head": False, "use_fp32_lm_head_output": False}
    return SimpleNamespace(**{**plain, "rl_on_policy_target": None, **attributes})


def project(products: Products, number: int, processor: Any, lm_head: Any) -> bool:
    """Whether an lm_head's product was a kernel's."""
    buffer = object()

    def original(got: Any, x: Any, head: Any, bias: Any = None, *, out: Any = None) -> Any:
        assert got is processor and head is lm_head and bias is None
        # Timed without the caller's buffer, called with it.
        assert out in (None, buffer)
        return torch.matmul(x, head.weight.T)

    x = rows(number)
    y = products.head(original, processor, x, lm_head, None, out=buffer)
    return not torch.equal(y, x @ lm_head.weight.T)


def test_the_lm_head() -> None:
    products, _ = make_products()
    assert project(products, 8, make_processor(), make_head())
    assert project(products, 8, make_processor(), make_head(quant_method=None))
    assert not project(products, 17, make_processor(), make_head())
    for processor in (
        make_processor(use_fp32_lm_head=True),
        make_processor(use_fp32_lm_head_output=True),
        make_processor(rl_on_policy_target="fsdp"),
        SimpleNamespace(),
    ):
        assert not project(products, 8, processor, make_head())
    for lm_head in (
        make_head(quant_method=Fp8LinearMethod()),
        make_head(set_lora=print, apply_lora=print),
    ):
        assert not project(products, 8, make_processor(), lm_head)
    assert not is_plain_head(SimpleNamespace())


def test_the_drafts_lm_head_shares_the_choice() -> None:
    products, kernels = make_products()

    def original(x: Any, lm_head: Any) -> Any:
        return torch.matmul(x, lm_head.weight.T)

    def is_ours(number: int, lm_head: Any) -> bool:
        x = rows(number)
        return not torch.equal(products.draft_head(original, x, lm_head), x @ WEIGHT.T)

    assert is_ours(7, make_head()) and project(products, 8, make_processor(), make_head())
    assert len(kernels.chosen) == 1
    assert not is_ours(40, make_head())
    assert not is_ours(7, make_head(quant_method=Fp8LinearMethod()))


def test_registration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hooked: list[tuple[str, str]] = []
    kind = SimpleNamespace(AROUND="around")
    monkeypatch.delenv(hooks_linear.CHOICES, raising=False)
    hooks_linear.register(lambda target, hook, how: hooked.append((target, how)), kind, ["linear"])
    assert hooked == [
        (hooks_linear.APPLY, "around"),
        (hooks_linear.HEAD, "around"),
        (hooks_linear.DRAFT_HEAD, "around"),
    ]
    norm: list[str] = []
    hooks_linear.register(lambda target, hook, how: norm.append(target), kind, ["norm"])
    assert norm == [hooks_linear.APPLY, *hooks_linear.MLPS, *hooks_norm.MODELS, hooks_norm.NORM]
    path = tmp_path / "choices.jsonl"
    path.write_text("no choices\n")
    monkeypatch.setenv(hooks_linear.CHOICES, str(path))
    with pytest.raises(ValueError, match=hooks_linear.CHOICES):
        hooks_linear.register(print, kind, ["markov"])


class UnquantizedLinearMethod:
    """Named as SGLang's."""


class MergedColumnParallelLinear:
    """Named as SGLang's."""

    bias = None
    gather_output = False
    output_partition_sizes = (12, 12)

    def __init__(self, **attributes: Any) -> None:
        self.weight, self.quant_method = WEIGHT, UnquantizedLinearMethod()
        self.__dict__.update(attributes)

    def __call__(self, x: Any) -> tuple[Any, None]:
        return F.linear(x, self.weight), None


class WithLora(MergedColumnParallelLinear):
    """Of another class."""


class Mlp:
    """As SGLang's: a product, an activation, a product, which here only notes its keywords."""

    def __init__(self, first: Any, **attributes: Any) -> None:
        self.gate_up_proj, self.act_fn = first, SiluAndMul()
        self.keywords: list[dict[str, Any]] = []
        self.__dict__.update(attributes)

    def down_proj(self, x: Any, **keywords: Any) -> tuple[Any, None]:
        self.keywords.append(keywords)
        return x * 2, None

    def run(self, products: Products, number: int, passed: tuple[str, ...], *given: Any) -> bool:
        """Whether the first product was a kernel's."""

        def original(module: Any, x: Any, *rest: Any) -> Any:
            assert module is self and rest == given
            return self.act_fn(self.gate_up_proj(x)[0]) * 2

        x = rows(number)
        y = products.mlp(passed, original, self, x, *given)
        expected = plain(x, self.gate_up_proj.weight, gated=True)
        if torch.equal(y, expected * 2):
            return False
        assert torch.equal(y, (expected + 1) * 2)
        return True


@pytest.fixture
def no_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hooks_linear, "is_sequence_parallel", lambda: False)


def test_an_mlp(no_ranks: None, monkeypatch: pytest.MonkeyPatch) -> None:
    products, kernels = make_products()
    mlp, batch = Mlp(MergedColumnParallelLinear()), object()
    assert mlp.run(products, 8, ("forward_batch",), batch) and mlp.run(products, 3, ())
    assert mlp.keywords == [{"forward_batch": batch}, {}]
    assert kernels.chosen == [((24, 16), 8)]
    # The same weight without its gate is another shape.
    assert apply(products, rows(8)) and len(kernels.chosen) == 2
    assert not mlp.run(products, 17, (), batch)
    pair = (rows(8), rows(8))
    assert products.mlp((), lambda module, x, *_: x, mlp, pair) is pair
    can_run = SimpleNamespace(can_run=lambda x, first: True)
    for other in (
        Mlp(WithLora()),
        Mlp(MergedColumnParallelLinear(quant_method=Fp8LinearMethod())),
        Mlp(MergedColumnParallelLinear(bias=torch.zeros(24))),
        Mlp(MergedColumnParallelLinear(gather_output=True)),
        Mlp(MergedColumnParallelLinear(output_partition_sizes=(8, 16))),
        Mlp(MergedColumnParallelLinear(), act_fn=type("Other", (SiluAndMul,), {})()),
        Mlp(MergedColumnParallelLinear(), dual_gemm=can_run),
    ):
        assert not other.run(products, 8, (), batch)
    monkeypatch.setattr(hooks_linear, "is_sequence_parallel", lambda: True)
    assert not mlp.run(products, 8, ())


def test_a_markov_head() -> None:
    products, _ = make_products()
    head = SimpleNamespace(markov_w2=torch.nn.Linear(16, 24, bias=False, dtype=torch.bfloat16))
    weight = head.markov_w2.weight

    def is_ours(number: int) -> bool:
        x = rows(number)
        y = products.markov(lambda got, x: F.linear(x, weight), head, x)
        return not torch.equal(y, F.linear(x, weight))

    assert not is_ours(1)
    with torch.no_grad():
        assert is_ours(1) and is_ours(8) and not is_ours(17)
        head.markov_w2 = lambda x: (F.linear(x, weight), None)
        assert not is_ours(1)


def test_sglang_has_what_is_hooked(caplog: pytest.LogCaptureFixture) -> None:
    sglang_folder()
    pytest.importorskip("sglang.srt.models.dspark")
    caplog.set_level(logging.ERROR)
    for target, names in (
        (hooks_linear.APPLY, ["self", "layer", "x", "bias"]),
        (hooks_linear.HEAD, ["self", "hidden_states", "lm_head", "embedding_bias", "out"]),
        (hooks_linear.DRAFT_HEAD, ["hidden", "lm_head"]),
        (hooks_linear.MARKOV, ["self", "latent_states"]),
    ):
        assert list(inspect.signature(pkgutil.resolve_name(target)).parameters) == names
    for target, keywords in hooks_linear.MLPS.items():
        resolved = pkgutil.resolve_name(target)
        names = list(inspect.signature(resolved).parameters)
        assert names in (["self", "x"], ["self", "x", "forward_batch"])
        text = inspect.getsource(resolved)
        assert ("down_proj(x, forward_batch=forward_batch)" in text) == bool(keywords)
        assert "self.act_fn" in text and text.count("self.gate_up_proj") <= 3
    assert not hooks_linear.is_sequence_parallel()
    from sglang.srt.batch_invariant_ops import is_batch_invariant_mode_enabled
    from sglang.srt.layers.logits_processor import _UNQUANTIZED_LM_HEAD_METHODS, LogitsProcessor

    assert not is_batch_invariant_mode_enabled()
    assert set(hooks_linear.PLAIN_METHODS) <= _UNQUANTIZED_LM_HEAD_METHODS
    source = inspect.getsource(LogitsProcessor)
    for name in ("use_fp32_lm_head", "use_fp32_lm_head_output", "rl_on_policy_target"):
        assert f"self.{name} = " in source
