"""`key=value` arguments of the commands that are not a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import TypeVar, cast

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from splitserve.errors import UserError, suggest

T = TypeVar("T")


def parse_options(cls: type[T], arguments: Sequence[str], *, nested: bool = False) -> T:
    """`key=value` arguments into an options dataclass, typed by its fields.

    Args:
        nested: take keys such as `data.path` too, which reach into an option.

    Raises:
        UserError: an unknown option, or a value of another type.
    """
    known = [item.name for item in fields(cls)]  # type: ignore[arg-type]
    for argument in arguments:
        key, equals, value = argument.partition("=")
        name = key.partition(".")[0] if nested else key
        if not equals or name not in known:
            raise UserError(key, value, "an option of this command", suggest(key, known))
    try:
        merged = OmegaConf.merge(OmegaConf.structured(cls), OmegaConf.from_dotlist([*arguments]))
        return cast(T, OmegaConf.to_object(merged))
    except (OmegaConfBaseException, YAMLError) as error:
        raise UserError(
            "option", " ".join(arguments), "values of the right type", str(error).splitlines()[0]
        ) from error
