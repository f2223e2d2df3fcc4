"""Only one release of SGLang is accepted."""

from __future__ import annotations

import tomllib
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from serving import version as gate

ROOT = Path(__file__).resolve().parents[2]


def test_the_supported_release_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "version", lambda name: gate.SUPPORTED)
    assert gate.require_sglang() == gate.SUPPORTED


def test_another_release_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "version", lambda name: "0.5.22")
    with pytest.raises(ValueError, match=r"0\.5\.22.*pip install sglang==0\.5\.23"):
        gate.require_sglang()


def test_a_missing_sglang_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(gate, "version", missing)
    with pytest.raises(ValueError, match="not installed") as caught:
        gate.require_sglang()
    assert 'pip install "splitserve-trainer[sglang]"' in str(caught.value)
    assert "engine=transformers" in str(caught.value)


def test_the_package_asks_for_the_release_that_the_gate_accepts() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert f"sglang=={gate.SUPPORTED}" in project["optional-dependencies"]["sglang"]
