"""From `recipe=NAME key=value ...` to settings objects, through Hydra.

A recipe is a YAML file with a defaults list over the groups in `configs/`. Overrides are Hydra's:
`train.steps=100` sets a field, `objective=dflash` takes another file of a group.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, get_type_hints

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException, OverrideParseException
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from splitserve import settings as settings_module
from splitserve.errors import UserError, suggest
from splitserve.settings import RunSettings

SCHEMA_NAME = "run_schema"
CPU_FACTS = Path("/proc/cpuinfo")
FREE_ON_RESUME = ("run_dir", "resume", "recipe", "tracker", "engine", "layout", "eval", "train")
"""What a resumed run may be given anew; anything else would make it another run."""
FIXED_TRAIN_FIELDS = ("global_batch_size", "num_anchors", "replay", "zero_stage", "dtype")


def config_root() -> Path:
    """The folder that holds `configs` and `recipes`: inside an installed package, or beside it."""
    package = Path(__file__).resolve().parent
    return package if (package / "recipes").is_dir() else package.parent


def recipe_names() -> list[str]:
    """The recipes that come with the package."""
    return sorted(path.stem for path in (config_root() / "recipes").glob("*.yaml"))


def group_options() -> dict[str, list[str]]:
    """Groups of `configs/` and the files in each."""
    folders = sorted(p for p in (config_root() / "configs").iterdir() if p.is_dir())
    return {p.name: sorted(f.stem for f in p.glob("*.yaml")) for p in folders}


def find_recipe(name: str) -> Path:
    """The file of a recipe, by name or by path.

    Raises:
        UserError: there is none; the nearest name is suggested.
    """
    if name.endswith((".yaml", ".yml")):
        path = Path(name)
        if not path.is_file():
            raise UserError("recipe", name, "an existing YAML file", "check the path")
        return path.resolve()
    path = config_root() / "recipes" / f"{name}.yaml"
    if not path.is_file():
        raise UserError("recipe", name, "a recipe's name or a path", suggest(name, recipe_names()))
    return path


def split_overrides(arguments: Sequence[str]) -> tuple[str, list[str]]:
    """The recipe's name and the other `key=value` arguments.

    Raises:
        UserError: an argument without `=`, or no recipe.
    """
    recipe, rest = "", []
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if not equals:
            raise UserError("argument", argument, "key=value", "write for example train.steps=100")
        if key == "recipe":
            recipe = value
        else:
            rest.append(argument)
    if not recipe:
        raise UserError("recipe", "", "a recipe's name or a path", suggest("", recipe_names()))
    return recipe, rest


def compose(arguments: Sequence[str]) -> RunSettings:
    """Settings from a command line such as `["recipe=smollm2_dspark", "train.steps=100"]`.

    Raises:
        UserError: unknown recipe, group option or field (with the nearest one), or a value of the
            wrong type or out of range.
    """
    recipe, overrides = split_overrides(arguments)
    path = find_recipe(recipe)
    _check_keys(overrides)
    _register(path.parent)
    name = path.stem
    search = f"hydra.searchpath=[file://{config_root() / 'configs'}]"
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(path.parent), version_base="1.3"):
            config = hydra_compose(
                name,
                [
                    search,
                    *map(_open_dictionary, overrides),
                    f"recipe={_quote(recipe_label(recipe))}",
                ],
            )
            return _to_object(config)
    except (HydraException, OmegaConfBaseException, YAMLError) as error:
        raise _explain(error, overrides) from error


def compose_resumed(stored: Path, arguments: Sequence[str]) -> RunSettings:
    """The settings of an earlier run with what the command line changes.

    Raises:
        UserError: the command line changes something that would make it another run.
    """
    overrides = [a for a in arguments if not a.startswith("recipe=")]
    _check_keys(overrides)
    groups = [o for o in overrides if "." not in o.partition("=")[0] and o.split("=")[0] in _TOP]
    if groups:
        raise UserError(
            groups[0].partition("=")[0],
            groups[0],
            "single fields, such as tracker.kind=wandb",
            "a resumed run keeps the groups that it began with",
        )
    try:
        base = OmegaConf.merge(schema(), OmegaConf.load(stored))
        before = _to_object(base)
    except (OmegaConfBaseException, OSError, YAMLError) as error:
        reason = str(error).partition("\n")[0]
        raise UserError(
            "run_dir",
            str(stored.parent),
            f"the folder of a run that this version can read; its {stored.name}: {reason}",
            "name another folder, or start a new run without resume=true",
        ) from error
    try:
        after = _to_object(OmegaConf.merge(base, OmegaConf.from_dotlist(overrides)))
    except (OmegaConfBaseException, YAMLError) as error:
        raise _explain(error, overrides) from error
    _refuse_other_run(before, after)
    return after


def _refuse_other_run(before: RunSettings, after: RunSettings) -> None:
    for item in fields(RunSettings):
        old, new = getattr(before, item.name), getattr(after, item.name)
        if item.name == "train":
            changed = [f for f in FIXED_TRAIN_FIELDS if getattr(old, f) != getattr(new, f)]
        elif item.name in FREE_ON_RESUME or old == new:
            changed = []
        else:
            names = [f.name for f in fields(old)] if is_dataclass(old) else [""]
            changed = [f for f in names if not f or getattr(old, f) != getattr(new, f)]
        if changed:
            name = ".".join(part for part in (item.name, changed[0]) if part)
            raise UserError(
                name,
                getattr(new, changed[0]) if changed[0] else new,
                f"{getattr(old, changed[0]) if changed[0] else old!r}, as when the run began",
                "leave it out, or start a new run without resume=true",
            )


def to_yaml(settings: RunSettings) -> str:
    """The resolved settings as YAML, readable by `compose_resumed`."""
    return OmegaConf.to_yaml(OmegaConf.structured(settings))


def recipe_label(recipe: str) -> str:
    """A recipe's name for folders: a path is cut down to its file name."""
    return Path(recipe).stem if recipe.endswith((".yaml", ".yml")) else recipe


_TOP = {
    item.name
    for item in fields(RunSettings)
    if is_dataclass(get_type_hints(RunSettings)[item.name])
}


def _to_object(config: Any) -> RunSettings:
    """The settings, with `auto` as what this machine wants; a run folder has it decided."""
    for section in ("target", "train"):
        if config[section].dtype == "auto":
            wide = config.layout.device == "cpu" and not multiplies_bfloat16(CPU_FACTS)
            chosen = {section: {"dtype": "float32" if wide else "bfloat16"}}
            config = OmegaConf.merge(config, chosen)
    settings = OmegaConf.to_object(config)
    assert isinstance(settings, RunSettings), type(settings)
    return settings


def multiplies_bfloat16(facts: Path) -> bool:
    """Whether a CPU multiplies bfloat16 matrices about as fast as float32 ones.

    Without AVX-512 (or Arm's bf16) oneDNN has no such products, and what torch takes instead is 10
    times slower than float32's. Read from the CPU's flags: asking torch, as the engine's plugin
    does (`splitserve.engine.cpu_linear`), would load it for commands that only read settings.

    Args:
        facts: like /proc/cpuinfo; a machine without it is taken for one that does.
    """
    try:
        text = facts.read_text()
    except OSError:
        return True
    flags = re.search(r"(?mi)^(?:flags|features)\s*:(.*)$", text)
    return flags is None or bool({"avx512bw", "bf16"} & set(flags[1].split()))


def _register(recipe_folder: Path) -> None:
    ConfigStore.instance().store(SCHEMA_NAME, schema())
    OmegaConf.register_new_resolver(
        "beside_recipe", lambda name: str(recipe_folder / name), replace=True
    )


def schema() -> DictConfig:
    """The typed tree that recipes fill.

    OmegaConf marks frozen dataclasses read-only; the tree must take values until it is turned
    into objects, which are frozen then.
    """
    tree = OmegaConf.structured(RunSettings)
    assert isinstance(tree, DictConfig), type(tree)
    _thaw(tree)
    return tree


def _thaw(node: Any) -> None:
    if not isinstance(node, DictConfig | ListConfig):
        return
    node._set_flag("readonly", None)
    content = node._content
    if isinstance(content, dict | list):
        for child in content.values() if isinstance(content, dict) else content:
            _thaw(child)


def _open_dictionary(override: str) -> str:
    """Let the keys of a free dictionary be set like any other field: Hydra wants `++` for new ones.

    A whole dictionary given by its own name is merged into what the recipe says.
    """
    key = override.partition("=")[0]
    free = any(key == path or key.startswith(path + ".") for path in _dictionary_paths())
    return "++" + override if free else override


def _dictionary_paths() -> list[str]:
    schema_of = OmegaConf.structured(RunSettings)
    return [p for p in setting_paths() if isinstance(OmegaConf.select(schema_of, p), DictConfig)]


def _quote(text: str) -> str:
    return "'" + text.replace("'", "\\'") + "'"


def setting_paths(cls: type = RunSettings, prefix: str = "") -> list[str]:
    """Every setting as a dotted path."""
    hints = get_type_hints(cls)
    found: list[str] = []
    for item in fields(cls):
        path = prefix + item.name
        hint = hints[item.name]
        is_group = isinstance(hint, type) and is_dataclass(hint)
        found += setting_paths(hint, path + ".") if is_group else [path]
    return found


def _check_keys(overrides: Sequence[str]) -> None:
    """Refuse an unknown field before Hydra does, so that the nearest one can be named."""
    known = setting_paths()
    groups = group_options()
    for override in overrides:
        key, _, value = override.partition("=")
        key = key.lstrip("+~")
        if key in groups:
            if value not in groups[key]:
                raise UserError(key, value, "a file of that group", suggest(value, groups[key]))
        elif key.startswith("data.sampling."):
            raise UserError(
                key,
                value,
                "a whole list",
                'write for example "data.sampling=[{temperature: 0.0}, {temperature: 0.8}]"',
            )
        elif key not in known and not any(key.startswith(path + ".") for path in known):
            raise UserError(key, value, "a setting", suggest(key, [*known, *groups]))


def _explain(error: Exception, overrides: Sequence[str]) -> UserError:
    """One message from what Hydra, OmegaConf or the YAML reader say in several lines."""
    cause: BaseException = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    if isinstance(cause, UserError):
        return cause
    if isinstance(error, YAMLError):
        return UserError("recipe", "", "a YAML file", " ".join(str(error).split()))
    if isinstance(error, OverrideParseException):
        field, _, given = error.override.partition("=")
        return UserError(
            field, given, "a value that can be read", "put it in quotes: " + f"'{field}=\"...\"'"
        )
    lines = [line for line in str(cause).strip().splitlines() if not line.startswith("In '")]
    lines = lines or str(cause).strip().splitlines() or ["see the recipe"]
    key = re.search(r"full_key: (\S+)", str(error) + "\n" + str(cause))
    field = key.group(1) if key else "settings"
    if field == "recipe" and "not in struct" in lines[0]:
        return UserError("recipe", "", "a recipe whose defaults begin with run_schema", "add it")
    if ambiguous := re.match(r"Ambiguous value for argument '(.*?)=(.*)'$", lines[0]):
        field, given = ambiguous.groups()
        return UserError(field, given, "one value", f"write a list as {field}=[{given}]")
    # A list's element is named with its place; the command line gives the whole list.
    whole = field.partition("[")[0]
    given = next((o.partition("=")[2] for o in overrides if o.startswith(f"{whole}=")), "")
    remedy = "correct that value"
    if unknown := re.match(r"Key '(\w+)' (?:is )?not in '(\w+)'", lines[0]):
        cls = getattr(settings_module, unknown.group(2), None)
        nested = [item.name for item in fields(cls)] if cls else []
        remedy = suggest(field, setting_paths() if "." in field else nested)
    return UserError(field, given, lines[0], remedy)
