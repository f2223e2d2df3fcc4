"""From a command line to settings, and from a stored run back to them."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

import pytest

from splitserve import compose as compose_module
from splitserve.compose import (
    compose,
    compose_resumed,
    config_root,
    group_options,
    recipe_names,
    setting_paths,
    to_yaml,
)
from splitserve.data.given import source_list
from splitserve.errors import UserError
from splitserve.settings import RunSettings

RECIPE = "recipe=smollm2_dspark"
SAMPLING = "data.sampling=[{temperature: 0.5, top_k: 5}]"
STORED = [RECIPE, "train.steps=7", "train.dtype=bfloat16", SAMPLING]
ROOT = Path(__file__).resolve().parents[2]
NEEDS = {
    "local": ["target.path=somewhere"],
    "prompts": ["data.prompts=mine.jsonl"],
    "conversations": ["data.conversations=mine.jsonl"],
}
"""What a group's file leaves to the user."""
WITH_PROMPTS = ("smollm2_dspark",)
"""Recipes that bring their prompts."""


def refusal(arguments: list[str]) -> UserError:
    with pytest.raises(UserError) as caught:
        compose(arguments)
    assert "\n" not in str(caught.value)
    return caught.value


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(to_yaml(compose(STORED)))
    return path


# --- composing -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", recipe_names())
def test_every_recipe_composes(name: str) -> None:
    if name in WITH_PROMPTS:
        settings = compose([f"recipe={name}"])
        assert Path(settings.data.prompts).is_file()
    else:
        message = str(refusal([f"recipe={name}"]))
        assert message.startswith("data.prompts=''") and "set data.prompts=FILE" in message
        settings = compose([f"recipe={name}", "data.prompts=mine.jsonl"])
    assert settings.recipe == name


@pytest.mark.parametrize(
    ("group", "option"),
    [(group, option) for group, options in group_options().items() for option in options],
)
def test_every_group_option_composes_with_the_recipe(group: str, option: str) -> None:
    settings = compose([RECIPE, f"{group}={option}", *NEEDS.get(option, [])])
    assert isinstance(settings, RunSettings)


@pytest.mark.parametrize(
    "given",
    ["mine.jsonl", "[a.jsonl, {path: 'hf:b//c@d', weight: 2.5}]", "{path: a.jsonl, domain: chat}"],
)
def test_sources_survive_a_stored_run(given: str, tmp_path: Path) -> None:
    settings = compose([RECIPE, "data=conversations", f"data.conversations={given}"])
    assert settings.data.prompts == ""
    path = tmp_path / "config.yaml"
    path.write_text(to_yaml(settings))
    again = compose_resumed(path, []).data.conversations
    assert again == settings.data.conversations and again
    assert source_list(again, "data.conversations")[0].path in ("mine.jsonl", "a.jsonl")
    with pytest.raises(UserError, match=r"data\.conversations=.*as when the run began"):
        compose_resumed(path, ["data.conversations=other.jsonl"])


def test_a_group_option_changes_what_it_says() -> None:
    assert compose([RECIPE, "objective=dflash"]).objective.l1 == 0.0
    assert compose([RECIPE, "draft=dflash_small"]).draft.markov_rank == 0
    assert compose([RECIPE, "tracker=wandb"]).tracker.kind == "wandb"
    assert compose([RECIPE, "engine=transformers"]).engine.kind == "transformers"


def test_fields_are_set_with_their_types() -> None:
    settings = compose(
        [
            RECIPE,
            "train.steps=3",
            "train.learning_rate=1e-4",
            "draft.target_layer_ids=[1,5,9]",
            "data.system_prompt=Be brief",
            "data.chat_template_kwargs.enable_thinking=false",
            "eval.final_temperatures=[]",
        ]
    )
    assert settings.train.steps == 3
    assert settings.train.learning_rate == 1e-4
    assert settings.draft.target_layer_ids == [1, 5, 9]
    assert settings.data.system_prompt == "Be brief"
    assert settings.data.chat_template_kwargs == {"enable_thinking": False}
    assert settings.eval.final_temperatures == []


@pytest.mark.parametrize(
    "arguments",
    [
        ["data.chat_template_kwargs={a: 1, b: x}"],
        ["data.chat_template_kwargs.a=1", "data.chat_template_kwargs.b=x"],
        ["+data.chat_template_kwargs.a=1", "++data.chat_template_kwargs.b=x"],
    ],
)
def test_a_free_dictionary_takes_any_key(arguments: list[str]) -> None:
    assert compose([RECIPE, *arguments]).data.chat_template_kwargs == {"a": 1, "b": "x"}


@pytest.mark.parametrize(
    ("facts", "dtype"),
    [
        ("flags\t\t: fpu avx2 fsrm\n", "float32"),
        ("flags\t\t: fpu avx2 avx512bw amx_bf16\n", "bfloat16"),
        ("Features\t: fp asimd bf16\n", "bfloat16"),
        ("Features\t: fp asimd\n", "float32"),
        ("processor: 0\n", "bfloat16"),
        (None, "bfloat16"),
    ],
)
def test_a_cpu_without_bfloat16_products_takes_float32(
    facts: str | None, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "cpuinfo"
    if facts is not None:
        file.write_text(facts)
    monkeypatch.setattr(compose_module, "CPU_FACTS", file)
    settings = compose([RECIPE])
    assert settings.target.dtype == settings.train.dtype == dtype
    assert compose([RECIPE, "target.dtype=bfloat16"]).target.dtype == "bfloat16"
    gpu = compose([RECIPE, "layout=gpu1", "engine=sglang_gpu"])
    assert gpu.target.dtype == gpu.train.dtype == "bfloat16"
    # What a run was started with stays, wherever it goes on.
    stored = tmp_path / "config.yaml"
    stored.write_text(to_yaml(settings))
    monkeypatch.setattr(compose_module, "CPU_FACTS", tmp_path / "none")
    assert compose_resumed(stored, []).train.dtype == dtype


def test_a_recipe_of_ones_own_is_taken_by_its_path(tmp_path: Path) -> None:
    text = (config_root() / "recipes" / "smollm2_dspark.yaml").read_text()
    recipe = tmp_path / "my recipes" / "mine.yaml"
    recipe.parent.mkdir()
    text, replaced = re.subn(r"(?m)^  steps: \d+$", "  steps: 11", text)
    assert replaced == 1
    recipe.write_text(text)
    (recipe.parent / "smollm2_prompts.jsonl").write_text("")
    settings = compose([f"recipe={recipe}"])
    assert settings.recipe == "mine"
    assert settings.train.steps == 11
    # The prompts that the recipe names lie beside it, not beside the shipped one.
    assert Path(settings.data.prompts).parent == recipe.parent


# --- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argument", "field", "nearest"),
    [
        ("recipe=smolm2_dspark", "recipe", "smollm2_dspark"),
        ("train.stepz=3", "train.stepz", "train.steps"),
        ("data.prompt=x", "data.prompt", "data.prompts"),
        ("objective=dsparc", "objective", "dspark"),
        ("tracker=wanb", "tracker", "wandb"),
        ("trian.steps=3", "trian.steps", "train.steps"),
        ("engin=transformers", "engin", "engine"),
    ],
)
def test_an_unknown_name_brings_the_nearest_one(argument: str, field: str, nearest: str) -> None:
    arguments = [argument] if argument.startswith("recipe=") else [RECIPE, argument]
    error = refusal(arguments)
    assert error.field == field
    assert f"did you mean {nearest!r}?" in str(error)


@pytest.mark.parametrize(
    ("argument", "field"),
    [
        ("train.steps=many", "train.steps"),
        ("train.learning_rate=fast", "train.learning_rate"),
        ("draft.warm_start=perhaps", "draft.warm_start"),
        ("draft.target_layer_ids=[a]", "draft.target_layer_ids"),
        ("train.steps=0", "train.steps"),
        ("layout.device=tpu", "layout.device"),
        ("data.prompts=", "data.prompts"),
        ("train.steps", "argument"),
        ("train.steps=[1", "train.steps"),
        ("data.prompts=a=b", "data.prompts"),
        ("data.sampling.0.top_k=5", "data.sampling.0.top_k"),
        ("train.steps=1,2", "train.steps"),
        ("data.prompts=a.jsonl,b.jsonl", "data.prompts"),
    ],
)
def test_an_unusable_value_is_refused_by_its_field(argument: str, field: str) -> None:
    error = refusal([RECIPE, argument])
    assert error.field.split("[")[0] == field


def test_no_recipe_is_refused_with_the_ones_there_are() -> None:
    error = refusal(["train.steps=3"])
    assert error.field == "recipe"
    assert "smollm2_dspark" in str(error)


def test_a_missing_recipe_file_is_refused(tmp_path: Path) -> None:
    assert refusal([f"recipe={tmp_path}/none.yaml"]).field == "recipe"


def test_a_recipe_that_names_an_unknown_field_is_refused(tmp_path: Path) -> None:
    recipe = tmp_path / "odd.yaml"
    recipe.write_text("defaults:\n  - run_schema\n  - _self_\ntrain:\n  stepz: 3\n")
    assert "did you mean 'train.steps'?" in str(refusal([f"recipe={recipe}"]))


def test_an_unknown_field_of_a_sampling_setting_is_refused() -> None:
    error = refusal([RECIPE, "data.sampling=[{temp: 0.5}]"])
    assert "did you mean 'temperature'?" in str(error)


def test_a_recipe_without_the_schema_is_refused(tmp_path: Path) -> None:
    recipe = tmp_path / "bare.yaml"
    recipe.write_text("train:\n  steps: 3\n")
    assert "run_schema" in str(refusal([f"recipe={recipe}"]))


def test_a_recipe_that_is_no_yaml_is_refused(tmp_path: Path) -> None:
    recipe = tmp_path / "odd.yaml"
    recipe.write_text("train: [\n")
    refusal([f"recipe={recipe}"])


# --- resuming ------------------------------------------------------------------------------------


def test_settings_survive_being_stored(stored: Path) -> None:
    settings = compose(STORED)
    assert compose_resumed(stored, []) == settings
    assert settings.data.sampling[0].top_k == 5


def test_a_resumed_run_keeps_what_is_not_named_again(stored: Path) -> None:
    settings = compose_resumed(
        stored, [RECIPE, "resume=true", "train.steps=9", "tracker.kind=wandb"]
    )
    assert settings.resume
    assert settings.train.steps == 9
    assert settings.tracker.kind == "wandb"
    assert settings.data.sampling[0].top_k == 5
    assert settings.train.learning_rate == 1.5e-3


@pytest.mark.parametrize(
    "argument",
    [
        "seed=1",
        "draft.num_layers=3",
        "draft.block_size=6",
        "draft.target_layer_ids=[0,1]",
        "data.max_tokens=300",
        "data.prompts=other.jsonl",
        "data.held_out_fraction=0.2",
        "target.path=other",
        "objective.ce=0.5",
        "train.global_batch_size=16",
        "train.num_anchors=4",
        "train.zero_stage=2",
        "train.dtype=float32",
    ],
)
def test_a_resumed_run_refuses_what_would_make_it_another(stored: Path, argument: str) -> None:
    with pytest.raises(UserError) as caught:
        compose_resumed(stored, ["resume=true", argument])
    assert caught.value.field == argument.partition("=")[0]
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("argument", ["objective=dflash", "train.stepz=3", "train.steps=many"])
def test_a_resumed_run_refuses_groups_and_unusable_values(stored: Path, argument: str) -> None:
    with pytest.raises(UserError) as caught:
        compose_resumed(stored, ["resume=true", argument])
    assert "\n" not in str(caught.value)


def test_a_stored_run_that_is_damaged_is_refused(stored: Path) -> None:
    stored.write_text("train: [\n")
    with pytest.raises(UserError) as caught:
        compose_resumed(stored, [])
    assert "\n" not in str(caught.value)


# --- the surface ---------------------------------------------------------------------------------


def test_the_option_surface_is_frozen() -> None:
    """A new setting, or the loss of one, is to be seen in review: update the list by hand."""
    frozen = (Path(__file__).parent / "option_surface.txt").read_text().split()
    assert setting_paths() == frozen


def receivers() -> dict[str, set[str]]:
    """For every attribute that the packages read: the last names of what it is read from."""
    found: dict[str, set[str]] = defaultdict(set)
    for package in ("splitserve", "dspark", "serving"):
        for file in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text())):
                if not isinstance(node, ast.Attribute) or not isinstance(node.ctx, ast.Load):
                    continue
                if isinstance(node.value, ast.Name):
                    found[node.attr].add(node.value.id)
                elif isinstance(node.value, ast.Attribute):
                    found[node.attr].add(node.value.attr.lstrip("_"))
    return found


def test_every_setting_is_read_somewhere() -> None:
    """Read from its own group: a check's `self.x` or another object's field does not count."""
    names = {"eval": {"measure"}, "objective": {"config"}}
    found = receivers()
    unread = [
        path
        for path in setting_paths()
        for group, _, field in [path.rpartition(".")]
        if not found[field] & {group, "settings", *names.get(group, ())}
    ]
    assert unread == []


def test_a_run_of_another_version_is_named(tmp_path: Path) -> None:
    stored = tmp_path / "config.yaml"
    stored.write_text("engine: {of_another_version: 1}\n")
    with pytest.raises(UserError, match=r"run_dir='.*config\.yaml: .*of_another_version.*start a"):
        compose_resumed(stored, [])
    with pytest.raises(UserError, match=r"run_dir='.*name another folder"):
        compose_resumed(tmp_path / "none.yaml", [])
