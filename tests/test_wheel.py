"""The wheel carries recipes and configs, and works where the sources are not."""

from __future__ import annotations

import configparser
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    result = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    (found,) = folder.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def unpacked(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("unpacked")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def test_every_recipe_and_config_is_in_it(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    sources = [p for top in ("configs", "recipes") for p in (ROOT / top).rglob("*") if p.is_file()]
    assert sources
    missing = {f"splitserve/{p.relative_to(ROOT).as_posix()}" for p in sources} - names
    assert missing == set()


def test_it_holds_the_three_packages_and_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.partition("/")[0] for name in names if ".dist-info" not in name}
    assert tops == {"dspark", "serving", "splitserve"}
    assert not [name for name in names if "__pycache__" in name or "/test_" in name]
    assert [name for name in names if name.endswith(".dist-info/licenses/LICENSE")]


def test_both_entry_points_are_declared(unpacked: Path) -> None:
    (file,) = unpacked.glob("*.dist-info/entry_points.txt")
    points = configparser.ConfigParser()
    points.read(file)
    assert points["console_scripts"]["splitserve"] == "splitserve.cli:main"
    # SGLang finds the capture plugin by this in each of its processes.
    assert points["sglang.srt.plugins"]["splitserve"] == "splitserve.engine.plugin:register"


def run(unpacked: Path, cwd: Path, *arguments: str) -> str:
    """Output of a Python process that finds the wheel's packages before any other."""
    result = subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(unpacked)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_the_recipe_is_found_from_an_empty_folder(unpacked: Path, tmp_path: Path) -> None:
    package = run(unpacked, tmp_path, "-c", "import splitserve; print(splitserve.__file__)")
    assert Path(package.strip()).is_relative_to(unpacked)
    text = run(unpacked, tmp_path, "-m", "splitserve.cli", "config", "recipe=smollm2_dspark")
    (prompts,) = [x.split(": ")[1] for x in text.splitlines() if x.startswith("  prompts: ")]
    assert Path(prompts).is_relative_to(unpacked)
    assert Path(prompts).is_file()
    assert list(tmp_path.iterdir()) == []
