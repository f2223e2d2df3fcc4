"""Lists of settings as a user gives them: a text, a dictionary, or several of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any, TypeVar, cast

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from splitserve.data.sources import SourceSettings
from splitserve.errors import UserError, suggest

T = TypeVar("T")


def source_list(value: Any, name: str) -> list[SourceSettings]:
    """The sources of a mixture.

    Args:
        value: a source's text, a dictionary of its path, weight and domain, or a list of these.
        name: the setting that errors name.

    Raises:
        UserError: none, or one that is not like that.
    """
    if not value:
        raise UserError(name, value, "a source or a list of them", f"set {name}=FILE")
    given: Sequence[Any] = value if isinstance(value, list | tuple) else [value]
    return [made(name, SourceSettings, {"path": s} if isinstance(s, str) else s) for s in given]


def made(name: str, cls: type[T], values: Any) -> T:
    """A settings object from a dictionary.

    Raises:
        UserError: an unknown field, or a value of another type.
    """
    known = [item.name for item in fields(cls)]  # type: ignore[arg-type]
    unknown = [key for key in values if key not in known] if isinstance(values, dict) else [""]
    if unknown:
        raise UserError(
            name, values, f"a dictionary of {', '.join(known)}", suggest(str(unknown[0]), known)
        )
    try:
        # Through OmegaConf, for the types.
        merged = OmegaConf.merge(_open_schema(cls), OmegaConf.create(values))
        return cast(T, cls(**cast(Any, OmegaConf.to_container(merged))))
    except OmegaConfBaseException as error:
        raise UserError(
            name, values, "values of the right type", str(error).splitlines()[0]
        ) from error


def _open_schema(cls: type) -> Any:
    schema = OmegaConf.structured(cls)
    OmegaConf.set_readonly(schema, False)
    return schema
