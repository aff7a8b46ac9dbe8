"""Schedules of settings such as the learning rate: factors of the initial value, over the used budget."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from zhixing.errors import UserError
from zhixing.utils.importing import import_object

Schedule = Callable[[float], float]  # used fraction of the budget, 0 to 1 -> factor of the initial value
Coefficient = Any  # a float, or with a schedule a tensor without dimensions, which compiled graphs read


def linear(fraction: float) -> float:
    return 1.0 - fraction


def cosine(fraction: float) -> float:
    return 0.5 * (1.0 + math.cos(math.pi * fraction))


def make_schedule(setting: str, name: str) -> Schedule | None:
    """Return a schedule by its name, or None if it is constant. `setting` is only for error messages."""
    if ":" not in name:
        return {"constant": None, "linear": linear, "cosine": cosine}[name]
    function = import_object(name)

    def checked(fraction: float) -> float:
        factor = function(fraction)
        if isinstance(factor, bool) or not isinstance(factor, (int, float)) or not 0.0 <= factor < math.inf:
            raise UserError(
                f"{setting}={name} returned {factor!r} for the fraction {fraction:g} of the budget: it must return the "
                f"factor of the initial value, a finite number of at least 0"
            )
        return float(factor)

    try:
        checked(0.0)
    except TypeError as error:
        raise UserError(f"{setting}={name} must be a function of the used fraction of the budget: {error}") from error
    return checked
