"""Which models' norms become part of products; the rest is in test_norm_layers."""

from __future__ import annotations

import inspect
import pkgutil
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_launch import sglang_folder

from serving import hooks_norm
from serving.hooks_linear import KeptChoices, Products
from serving.hooks_norm import Behind, Norms


class RMSNorm:
    """Named as SGLang's."""

    def __init__(self, **attributes: Any) -> None:
        self.weight = torch.ones(16, dtype=torch.bfloat16)
        self.variance_epsilon = 1e-6
        self.cast_x_before_out_mul = self.fp32_residual = False
        self.variance_size_override = self.override_orig_dtype = None
        self.__dict__.update(attributes)


class UnquantizedLinearMethod:
    """Named as SGLang's."""


class RowParallelLinear:
    """Named as SGLang's."""

    skip_bias_add = False

    def __init__(self, **attributes: Any) -> None:
        self.quant_method = UnquantizedLinearMethod()
        self.__dict__.update(attributes)


class WithLora(RowParallelLinear):
    """Of another class."""


class Qwen3Attention:
    def __init__(self) -> None:
        self.qkv_proj, self.o_proj = RowParallelLinear(), RowParallelLinear()


class Qwen2MLP:
    def __init__(self) -> None:
        self.gate_up_proj, self.down_proj = RowParallelLinear(), RowParallelLinear()


class Qwen3DecoderLayer:
    def __init__(self, **attributes: Any) -> None:
        self.self_attn, self.mlp = Qwen3Attention(), Qwen2MLP()
        self.input_layernorm, self.post_attention_layernorm = RMSNorm(), RMSNorm()
        self.__dict__.update(attributes)


class Another(Qwen3DecoderLayer):
    """A subclass, which may do other things."""


class LlamaMLP(Qwen2MLP):
    """Of another model."""


@pytest.fixture(autouse=True)
def server(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """What the hook asks SGLang about."""
    made = SimpleNamespace(ranks=1, deterministic=False)
    monkeypatch.setattr(hooks_norm, "num_ranks", lambda: made.ranks)
    monkeypatch.setattr(hooks_norm, "is_deterministic", lambda: made.deterministic)
    return made


def broken_layer(place: str, name: str, value: Any) -> Qwen3DecoderLayer:
    layer = Qwen3DecoderLayer()
    owner: Any = layer
    for part in place.split("."):
        owner = getattr(owner, part)
    setattr(owner, name, value)
    return layer


def test_norms_follow_products() -> None:
    layers = [Qwen3DecoderLayer() for _ in range(3)]
    found = hooks_norm.norms_behind(layers)
    assert len(found) == 5
    assert found[id(layers[0].self_attn.o_proj)] is layers[0].post_attention_layernorm
    assert found[id(layers[0].mlp.down_proj)] is layers[1].input_layernorm
    assert id(layers[2].mlp.down_proj) not in found


def test_models_that_are_refused(server: SimpleNamespace) -> None:
    plain = Qwen3DecoderLayer()
    assert hooks_norm.refusal([plain]) == ""
    assert hooks_norm.refusal([]) == "no layers"
    for layer, why in (
        (Another(), "a Another"),
        (Qwen3DecoderLayer(mlp=LlamaMLP()), "a Qwen3Attention and a LlamaMLP"),
        (Qwen3DecoderLayer(mlp_conv=print), "convolutions"),
        (Qwen3DecoderLayer(input_layernorm=type("GemmaRMSNorm", (RMSNorm,), {})()), "a Gemma"),
        (Qwen3DecoderLayer(input_layernorm=RMSNorm(weight=torch.ones(16))), "norms in torch.float"),
        (broken_layer("input_layernorm", "cast_x_before_out_mul", True), "rounds first"),
        (broken_layer("input_layernorm", "variance_size_override", 8), "norm of a part"),
        (broken_layer("post_attention_layernorm", "fp32_residual", True), "float32 residual"),
        (broken_layer("self_attn", "o_proj", WithLora()), "a WithLora"),
        (broken_layer("mlp.down_proj", "quant_method", print), "builtin_function"),
        (broken_layer("self_attn.o_proj", "skip_bias_add", True), "added later"),
    ):
        assert why in hooks_norm.refusal([plain, layer])
    server.ranks = 2
    assert hooks_norm.refusal([plain]) == "several ranks"
    server.ranks, server.deterministic = 1, True
    assert hooks_norm.refusal([plain]) == "deterministic inference"


@pytest.mark.parametrize(
    ("verify", "positions", "served"),
    [
        (True, torch.arange(8), True),
        (True, torch.arange(16), True),
        (True, torch.arange(17), False),
        (True, torch.arange(0), False),
        (True, torch.zeros(3, 8), False),
        (False, torch.arange(8), False),
    ],
)
def test_verifications_of_few_rows(verify: bool, positions: Any, served: bool) -> None:
    norms, layer = Norms(), Qwen3DecoderLayer()
    model = SimpleNamespace(layers=[layer])
    batch = SimpleNamespace(forward_mode=SimpleNamespace(is_target_verify=lambda: verify))
    seen: list[Any] = []

    def original(got: Any, ids: Any, at: Any, given: Any, embeds: Any = None) -> str:
        assert got is model and at is positions and given is batch and embeds == "embeds"
        h = torch.zeros(len(positions), 16, dtype=torch.bfloat16)
        norms.around_norm(lambda norm, x, *_: x, layer.input_layernorm, h)
        seen.append(norms.behind(layer.self_attn.o_proj, len(positions)))
        return "out"

    assert norms.around_model(original, model, None, positions, batch, embeds="embeds") == "out"
    assert (seen[0] is not None) == served
    if served:
        assert isinstance(seen[0], Behind) and seen[0].norm is layer.post_attention_layernorm
    assert norms.behind(layer.self_attn.o_proj, 8) is None


def test_other_products_are_sglangs_where_only_norms_were_asked_for() -> None:
    products = Products(KeptChoices(None), ["norm"])
    x = torch.ones(4, 16, dtype=torch.bfloat16)
    layer = SimpleNamespace(weight=torch.ones(24, 16, dtype=torch.bfloat16))
    assert products.linear(lambda *_: "sglang", None, layer, x) == "sglang"
    assert products.mlp((), lambda *_: "sglang", SimpleNamespace(), x) == "sglang"
    assert not products.plans


def test_sglang_is_as_the_hooks_take_it() -> None:
    folder = sglang_folder()
    pytest.importorskip("sglang.srt.models.dspark")
    for target in hooks_norm.MODELS:
        names = list(inspect.signature(pkgutil.resolve_name(target)).parameters)
        assert names[:5] == ["self", "input_ids", "positions", "forward_batch", "input_embeds"]
    names = list(inspect.signature(pkgutil.resolve_name(hooks_norm.NORM)).parameters)
    assert names == ["self", "x", "residual", "post_residual_addition", "quant_linear"]
    for path, text in (
        ("srt/models/qwen3.py", "hidden_states = self.mlp(hidden_states, forward_batch"),
        ("srt/models/llama.py", "hidden_states = self.mlp(hidden_states, forward_batch"),
        ("srt/models/dflash.py", "self.post_attention_layernorm(attn_out, residual)"),
        ("srt/models/qwen3.py", "from sglang.srt.models.qwen2 import Qwen2MLP as Qwen3MLP"),
        ("srt/layers/layernorm.py", "class RMSNorm("),
    ):
        assert text in (folder / path).read_text()
