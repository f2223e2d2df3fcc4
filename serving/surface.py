"""The arguments and environment variables that the installed SGLang has, read from its source.

Importing SGLang for its argument parser takes ten seconds and opens a GPU where there is one; its
sources say the same.
"""

from __future__ import annotations

import ast
import difflib
from collections.abc import Iterable
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from serving.launch_spec import Launch
from serving.version import SUPPORTED

OWN_PREFIX = "SPLITSERVE_"


def sglang_folder() -> Path:
    """Where SGLang is installed; it is not imported.

    Raises:
        ValueError: it is not installed.
    """
    spec = find_spec("sglang")
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(
            f"sglang is not installed; allowed: sglang=={SUPPORTED}; install "
            '"splitserve-trainer[sglang]" to check and to start a server'
        )
    return Path(next(iter(spec.submodule_search_locations)))


@cache
def known_arguments(folder: Path) -> frozenset[str]:
    """Python names of SGLang's command-line arguments, those whose flag has the same name.

    Source: srt/arg_groups/fields/*.py, whose annotated fields the parser is made from, and the
    few arguments that srt/server_args.py adds by hand.
    """
    names: set[str] = set()
    for file in sorted((folder / "srt" / "arg_groups" / "fields").glob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            # A[type, ...] is an argument, unless it says that it has no flag or another one.
            if (
                isinstance(node, ast.AnnAssign)
                and isinstance(node.target, ast.Name)
                and isinstance(node.annotation, ast.Subscript)
                and isinstance(node.annotation.value, ast.Name)
                and node.annotation.value.id == "A"
                and not _has_another_flag(node.annotation, node.target.id)
            ):
                names.add(node.target.id)
    for node in ast.walk(ast.parse((folder / "srt" / "server_args.py").read_text())):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add_argument":
            for word in node.args:
                if isinstance(word, ast.Constant) and str(word.value).startswith("--"):
                    names.add(str(word.value)[2:].replace("-", "_"))
    return frozenset(names)


def _has_another_flag(annotation: ast.Subscript, name: str) -> bool:
    calls = [node for node in ast.walk(annotation) if isinstance(node, ast.Call)]
    given = {
        k.arg: k.value.value
        for call in calls
        for k in call.keywords
        if isinstance(k.value, ast.Constant)
    }
    flag = given.get("cli_name")
    return bool(given.get("no_cli")) or flag not in (None, "--" + name.replace("_", "-"))


@cache
def known_environment(folder: Path) -> frozenset[str]:
    """Environment variables that SGLang declares. Source: srt/environ.py."""
    names = set()
    for node in ast.walk(ast.parse((folder / "srt" / "environ.py").read_text())):
        if isinstance(node, ast.Assign):
            names |= {t.id for t in node.targets if isinstance(t, ast.Name)}
    return frozenset(name for name in names if name.startswith("SGLANG_"))


def check_surface(launch: Launch, folder: Path | None = None) -> None:
    """Refuse a start that names what the installed SGLang does not have.

    Raises:
        ValueError: names each unknown argument and variable, and the nearest known one.
    """
    folder = folder or sglang_folder()
    unknown = _unknown(launch.argument_dict(), known_arguments(folder), "argument")
    ours = [name for name in launch.environment_dict() if name.startswith("SGLANG_")]
    unknown += _unknown(ours, known_environment(folder), "environment variable")
    if unknown:
        raise ValueError(f"the installed SGLang has {'; '.join(unknown)}")


def _unknown(names: Iterable[str], known: frozenset[str], what: str) -> list[str]:
    found = []
    for name in names:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
            remedy = f"did you mean {close[0]}?" if close else "leave it out"
            found.append(f"no {what} {name}; {remedy}")
    return found
