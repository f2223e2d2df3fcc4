"""SGLang's own layers with norms inside the products around them, in a process on the CPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from sglang_testing import run_script
from test_launch import sglang_folder

MOST_ERROR = 0.02
"""RMS behind three layers, relative: both sides round to bfloat16 by cutting off."""


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Any:
    sglang_folder()
    pytest.importorskip("triton", reason="triton has no build for this platform")
    pytest.importorskip("sglang.srt.models.dspark")
    file = tmp_path_factory.mktemp("norm") / "results.json"
    script = Path(__file__).with_name("norm_process.py")
    run_script(script, file, TRITON_INTERPRET="1")
    return json.loads(file.read_text())


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("qwen3", "Qwen3DecoderLayer"),
        ("llama", "LlamaDecoderLayer"),
        ("draft", "DFlashDecoderLayer"),
    ],
)
def test_all_norms_between_the_first_and_the_last(results: Any, name: str, layer: str) -> None:
    """Three layers have seven; what a target's layers 1 and 2 get is captured."""
    found = results[name]
    assert len(found["errors"]) == (1 if name == "draft" else 3)
    assert 0 < max(found["errors"]) < MOST_ERROR
    assert found["kernels"] == found["kernels_again"] == {"plain": 2, "add": 5, "normed": 5}
    assert f"kernels: norm is active for {layer}, 5 norms" in found["lines"]


def test_a_product_that_fails_gets_the_norms_result(results: Any) -> None:
    """And so does each behind it, in this forward; from the next one on, SGLang's norms run."""
    found = results["qwen3 broken"]
    assert 0 < max(found["errors"]) < MOST_ERROR
    assert found["kernels"] == {"plain": 5, "add": 5}
    assert found["kernels_again"] == {"plain": 12}
    text = "\n".join(found["lines"])
    assert "with the norm before stays SGLang's: RuntimeError('too many resources')" in text
    assert "norm is left out where the product behind is SGLang's, 7 rows" in text


def test_a_result_that_went_elsewhere_is_noticed(results: Any) -> None:
    found = results["llama lost"]
    assert found["errors"] == [0.0, 0.0, 0.0]
    assert "kernels: norm is left out: a product's result went elsewhere" in found["lines"]
    assert found["kernels_again"] == {"plain": 12}
