"""The launch line holds flags that the supported SGLang has, and is refused for a bad draft."""

from __future__ import annotations

import ast
import json
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import pytest
from test_contract import DRAFT, TARGET

from serving.launch import launch_command
from serving.version import SUPPORTED


def write(folder: Path, config: dict[str, Any]) -> str:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def sglang_folder() -> Path:
    """Where SGLang is installed; importing it would load an engine."""
    try:
        found = distribution("sglang")
    except PackageNotFoundError:
        pytest.skip("SGLang is not installed")
    if found.version != SUPPORTED:
        pytest.skip(f"SGLang {found.version} is installed, {SUPPORTED} is meant")
    return Path(str(found.locate_file("sglang")))


def server_fields() -> set[str]:
    """The fields that SGLang makes its flags from, with dashes for underscores."""
    files = sorted((sglang_folder() / "srt" / "arg_groups" / "fields").glob("*.py"))
    nodes = [node for file in files for node in ast.walk(ast.parse(file.read_text()))]
    assigned = [n.target for n in nodes if isinstance(n, ast.AnnAssign)]
    return {target.id for target in assigned if isinstance(target, ast.Name)}


def test_the_line_names_draft_and_target(tmp_path: Path) -> None:
    target, draft = write(tmp_path / "target", TARGET), write(tmp_path / "draft", DRAFT)
    command = launch_command(draft, target, tp_size=4)
    assert command[:3] == ["python", "-m", "sglang.launch_server"]
    options = dict(zip(command[3::2], command[4::2], strict=True))
    assert options == {
        "--model-path": target,
        "--speculative-algorithm": "DSPARK",
        "--speculative-draft-model-path": draft,
        "--tp-size": "4",
    }


def test_every_flag_exists_in_the_supported_sglang(tmp_path: Path) -> None:
    command = launch_command(write(tmp_path / "draft", DRAFT), "some/target")
    flags = [argument for argument in command if argument.startswith("--")]
    fields = server_fields()
    assert len(fields) > 100
    assert [f for f in flags if f.removeprefix("--").replace("-", "_") not in fields] == []


def test_module_and_algorithm_exist_in_the_supported_sglang() -> None:
    folder = sglang_folder()
    assert (folder / "launch_server.py").is_file()
    algorithms = ast.parse((folder / "srt" / "speculative" / "spec_info.py").read_text())
    names = {n.id for n in ast.walk(algorithms) if isinstance(n, ast.Name)}
    assert "DSPARK" in names


def test_a_target_on_a_hub_is_not_looked_into(tmp_path: Path) -> None:
    draft = write(tmp_path / "draft", {**DRAFT, "hidden_size": 1})
    assert "some/target" in launch_command(draft, "some/target")


def test_a_draft_that_does_not_fit_is_refused_with_every_reason(tmp_path: Path) -> None:
    draft = write(tmp_path / "draft", {**DRAFT, "hidden_size": 1, "markov_rank": 0})
    with pytest.raises(ValueError, match=r"hidden_size is 1.*markov_rank|markov_rank.*hidden_size"):
        launch_command(draft, write(tmp_path / "target", TARGET))
