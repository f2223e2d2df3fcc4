"""Checks of single settings: one error that names the setting, its value and what is allowed."""

from __future__ import annotations

import math

from splitserve.errors import UserError


def check(name: str, value: object, good: bool, allowed: str, remedy: str = "") -> None:
    """Refuse a value unless it is good."""
    if not good:
        raise UserError(name, value, allowed, remedy or f"set {name} to one of these")


def check_one_of(name: str, value: object, choices: tuple[str, ...]) -> None:
    """Refuse a value that is none of the choices."""
    check(name, value, value in choices, ", ".join(choices))


def check_at_least(name: str, value: float, minimum: float) -> None:
    """Refuse a value below the minimum, or one that is not finite."""
    remedy = f"raise {name}" if value < minimum else f"set {name} to a finite number"
    check(name, value, minimum <= value < math.inf, f"{minimum} or more", remedy)


def check_fraction(name: str, value: float) -> None:
    """Refuse a value outside of 0 to 1."""
    check(name, value, 0.0 <= value <= 1.0, "0 to 1", f"set {name} to a fraction")
