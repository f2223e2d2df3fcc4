"""What a server is started with: SGLang's arguments and its environment, each with its reason."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

Value = str | int | float | bool | tuple[int, ...]
MODULE = "sglang.launch_server"


@dataclass(frozen=True, slots=True)
class Setting:
    """One argument of SGLang by its Python name, or one environment variable."""

    name: str
    value: Value
    reason: str

    def words(self) -> list[str]:
        """As on a command line; a switch that is off says nothing."""
        flag = "--" + self.name.replace("_", "-")
        if isinstance(self.value, bool):
            return [flag] if self.value else []
        if isinstance(self.value, tuple):
            return [flag, *map(str, self.value)]
        return [flag, str(self.value)]


@dataclass(frozen=True, slots=True)
class Launch:
    """A complete start of SGLang; later settings of a name replace earlier ones."""

    profile: str
    arguments: tuple[Setting, ...]
    environment: tuple[Setting, ...] = ()

    def plus(
        self, arguments: Iterable[Setting] = (), environment: Iterable[Setting] = ()
    ) -> Launch:
        """The same with settings added or replaced."""
        return replace(
            self,
            arguments=_merged(self.arguments, arguments),
            environment=_merged(self.environment, environment),
        )

    def argument_dict(self) -> dict[str, Any]:
        """For `sglang.Engine`."""
        return {
            s.name: list(s.value) if isinstance(s.value, tuple) else s.value for s in self.arguments
        }

    def environment_dict(self) -> dict[str, str]:
        """Variables as text; switches are 1 and 0."""
        return {
            s.name: str(int(s.value)) if isinstance(s.value, bool) else str(s.value)
            for s in self.environment
        }

    def command(self, python: str = "python") -> list[str]:
        """The launch line without its environment, one word an item."""
        words = [word for setting in self.arguments for word in setting.words()]
        return [python, "-m", MODULE, *words]

    def line(self) -> str:
        """The launch line as it can be pasted into a shell, environment first."""
        variables = [f"{k}={shlex.quote(v)}" for k, v in self.environment_dict().items()]
        return " ".join([*variables, shlex.join(self.command())])

    def rows(self) -> list[list[str]]:
        """Name, value and reason of everything that is set."""
        return [[s.name, _shown(s.value), s.reason] for s in (*self.arguments, *self.environment)]


def _shown(value: Value) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _merged(old: Iterable[Setting], new: Iterable[Setting]) -> tuple[Setting, ...]:
    by_name = {s.name: s for s in old}
    # A dict keeps the place of a name that is set again.
    for setting in new:
        by_name[setting.name] = setting
    return tuple(by_name.values())


def given(values: Mapping[str, Any], reason: str = "given on the command line") -> list[Setting]:
    """Settings of a user's own.

    Raises:
        ValueError: a value is of a type that no argument has.
    """
    settings = []
    for name, value in values.items():
        if isinstance(value, list):
            value = tuple(value)
        if not isinstance(value, str | int | float | bool | tuple):
            raise ValueError(
                f"{name}={value!r} is not usable; allowed: text, a number, true, false, or a list "
                "of numbers; quote it if it is text"
            )
        settings.append(Setting(name, value, reason))
    return settings
