"""Targets by hub name: a folder first, then the hub, then one error that says what to do."""

from __future__ import annotations

from pathlib import Path

import huggingface_hub
import pytest

from splitserve.target.hub import local_folder
from splitserve.target.prepare import prepare_target

NAME = "someone/Some-Model.1"


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[str, list[str]]]:
    """A hub that has every model; what it was asked for."""
    calls: list[tuple[str, list[str]]] = []

    def download(name: str, allow_patterns: list[str]) -> str:
        calls.append((name, allow_patterns))
        return str(tmp_path / "snapshot")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    return calls


def test_a_hub_name_becomes_the_folder_that_the_hub_gives(
    asked: list[tuple[str, list[str]]], tmp_path: Path
) -> None:
    assert local_folder(NAME) == tmp_path / "snapshot"
    ((name, patterns),) = asked
    assert name == NAME and {"*.json", "*.safetensors"} <= set(patterns)


@pytest.mark.parametrize("path", ["folder", "a/b/c", "/abs/folder", "./a/b", "~/a", "../a", "a/b "])
def test_what_is_no_hub_name_is_never_asked_for(
    asked: list[tuple[str, list[str]]], path: str
) -> None:
    assert local_folder(path) == Path(path).expanduser()
    assert asked == []


def test_a_folder_of_that_name_wins(
    asked: list[tuple[str, list[str]]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / NAME).mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert local_folder(NAME) == Path(NAME)
    assert asked == []


def test_an_unreachable_hub_is_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> str:
        raise OSError("Name or service not\n known")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(ValueError) as caught:
        prepare_target(path=NAME)
    message = str(caught.value)
    assert message.startswith(f"target.path={NAME!r}")
    for part in ("allowed:", "target.path=FOLDER", "OSError: Name or service not known"):
        assert part in message
    assert "\n" not in message
