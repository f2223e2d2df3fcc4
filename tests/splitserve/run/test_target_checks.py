"""What a run asks of its target before a process is started."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from splitserve import cli
from splitserve.compose import compose
from splitserve.errors import UserError
from splitserve.run.commands import EvalOptions, _eval_spec
from splitserve.run.folder import RunFolder
from splitserve.run.gpus import Gpu, Placement
from splitserve.run.plan import check_split, make_plan
from splitserve.run.workers import Workers
from splitserve.settings import DataSettings, LayoutSettings, RunSettings, TargetSettings

WINDOW = 128


@pytest.fixture
def own_target(tiny_target: Path, tmp_path: Path) -> Path:
    """A copy that a test may spoil."""
    return shutil.copytree(tiny_target, tmp_path / "own_target")


def change_config(folder: Path, **values: Any) -> None:
    file = folder / "config.json"
    config = {**json.loads(file.read_text()), **values}
    file.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))


def test_samples_longer_than_the_target_are_refused(tiny_recipe: Path) -> None:
    settings = [f"recipe={tiny_recipe}", "data.max_tokens=129"]
    with pytest.raises(UserError, match=r"data\.max_tokens=129.*128 positions.*would have 129"):
        make_plan(compose(settings))
    make_plan(compose([*settings, f"data.max_tokens={WINDOW}"]))


def test_a_stretched_target_takes_longer_samples(tiny_recipe: Path, own_target: Path) -> None:
    rope = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": WINDOW}
    change_config(own_target, rope_scaling=rope, rope_parameters=None)
    given = [f"recipe={tiny_recipe}", f"target.path={own_target}"]
    make_plan(compose([*given, "data.max_tokens=256"]))
    with pytest.raises(UserError, match=r"data\.max_tokens=257.*256 positions"):
        make_plan(compose([*given, "data.max_tokens=257"]))


@pytest.mark.parametrize(("chunk", "expected"), [(32, 114), (100, WINDOW), (2048, WINDOW)])
def test_an_engine_has_no_more_places_than_its_target(
    tiny_recipe: Path, tmp_path: Path, chunk: int, expected: int
) -> None:
    settings = compose([f"recipe={tiny_recipe}", f"engine.chunked_prefill_size={chunk}"])
    workers = Workers(settings, RunFolder(tmp_path), make_plan(settings), (), None, "")
    assert workers._context_length(50) == expected
    # Requests come first.
    assert workers._context_length(WINDOW) == WINDOW + 64


def test_measured_answers_longer_than_the_target_are_refused(tiny_recipe: Path) -> None:
    with pytest.raises(UserError, match=r"eval\.max_new_tokens=120.*128 positions"):
        make_plan(compose([f"recipe={tiny_recipe}", "eval.max_new_tokens=120"]))


def test_eval_refuses_answers_longer_than_the_target(tiny_target: Path, tiny_recipe: Path) -> None:
    prompts = str(tiny_recipe.parent / "prompts.jsonl")
    given = EvalOptions(draft="none", target=str(tiny_target), prompts=prompts)
    spec, _ = _eval_spec(given)
    assert spec.max_new_tokens == 64
    longer = EvalOptions(draft="none", target=str(tiny_target), prompts=prompts, max_new_tokens=120)
    with pytest.raises(UserError, match=r"max_new_tokens=120.*128 positions"):
        _eval_spec(longer)


def test_generate_refuses_answers_longer_than_the_target(
    tiny_target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "p.txt").write_text("one\n")
    command = ["data", "generate", f"target={tiny_target}", f"data={tmp_path / 'p.txt'}"]
    out = tmp_path / "out"
    assert cli.main([*command, f"out={out}", "sampling=[{temperature: 0}]"]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert "max_tokens=2048" in line and "128 positions" in line
    assert not out.exists()


def test_weights_of_another_model_are_refused(tiny_recipe: Path, own_target: Path) -> None:
    given = compose([f"recipe={tiny_recipe}", f"target.path={own_target}"])
    make_plan(given)
    change_config(own_target, num_hidden_layers=5)
    with pytest.raises(ValueError, match="no weights for layer 4"):
        make_plan(given)
    change_config(own_target, num_hidden_layers=4)
    file = own_target / "model.safetensors"
    tensors = load_file(file)
    name = "model.embed_tokens.weight"
    save_file({**tensors, name: tensors[name][:-1].clone()}, file, {"format": "pt"})
    with pytest.raises(ValueError, match=r"embed_tokens\.weight of shape"):
        make_plan(given)
    save_file({name.replace("embed", "table"): torch.zeros(1)}, file, {"format": "pt"})
    with pytest.raises(ValueError, match="no token embedding"):
        make_plan(given)


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("num_attention_heads", "complete its config.json"),
        ("max_position_embeddings", "complete its config.json"),
        ("intermediate_size", r"set draft\.intermediate_size"),
    ],
)
def test_a_config_without_what_the_draft_takes_over_is_refused(
    tiny_recipe: Path, own_target: Path, name: str, remedy: str
) -> None:
    change_config(own_target, **{name: None})
    given = [f"recipe={tiny_recipe}", f"target.path={own_target}"]
    with pytest.raises(UserError, match=rf"an integer {name} in its config\.json.*{remedy}"):
        make_plan(compose(given))
    if name == "intermediate_size":
        make_plan(compose([*given, "draft.intermediate_size=48"]))


def test_an_engine_whose_gpus_do_not_divide_the_heads_is_refused() -> None:
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48}
    layout = LayoutSettings(device="cuda", target=[0, 1, 2, 3, 4, 5], train=[6], engines=2)
    data = DataSettings(prompts="p")
    settings = RunSettings(target=TargetSettings(path="t"), data=data, layout=layout)
    with pytest.raises(UserError, match=r"layout\.target=.*1, 2, 4 GPUs each.*makes them 3 each"):
        check_split(settings, 3, heads, "the draft")
    for tp_size in (1, 2, 4):
        check_split(settings, tp_size, heads, "the draft")


def test_a_run_checks_how_its_engines_split_the_target(
    tiny_recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus = tuple(Gpu(str(number), "some", 2**40) for number in range(3))
    monkeypatch.setattr("splitserve.run.plan.place", lambda layout: Placement(gpus, gpus[:1]))
    with pytest.raises(UserError, match=r"num_attention_heads=4.*of LlamaForCausalLM"):
        make_plan(compose([f"recipe={tiny_recipe}"]))


@pytest.mark.parametrize(("tp_size", "allowed"), [(3, "1, 2, 4, by which"), (0, "1 or more")])
def test_generate_checks_how_the_target_is_split(
    tiny_target: Path,
    tmp_path: Path,
    tp_size: int,
    allowed: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "p.txt").write_text("one\n")
    command = [
        "data", "generate", f"target={tiny_target}", f"data={tmp_path / 'p.txt'}", "max_tokens=100",
        f"out={tmp_path / 'out'}", "sampling=[{temperature: 0}]", f"tp_size={tp_size}",
        "device=cuda",
    ]  # fmt: skip
    assert cli.main(command) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert f"tp_size={tp_size}" in line and allowed in line
