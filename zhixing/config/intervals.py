"""Durations and intervals: a number with a unit, such as `10m` or `"20 episodes"`."""

from __future__ import annotations

import functools
import re
from typing import Literal, NamedTuple

_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


class Interval(NamedTuple):
    """The distance between two events, such as evaluations."""

    number: float
    unit: Literal["steps", "episodes", "updates", "seconds"]


def parse_duration(duration: str | float) -> float:
    """Return `90`, `90s`, `10m` or `1h30m` in seconds."""
    if isinstance(duration, (int, float)):
        return float(duration)
    parts = re.findall(r"(\d+(?:\.\d+)?)([smhd])", duration)
    if not parts or "".join(number + unit for number, unit in parts) != duration:
        raise ValueError(f"{duration!r} is not a duration; write for example 90s, 10m or 1h30m")
    total = sum(float(number) * _SECONDS[unit] for number, unit in parts)
    if total <= 0:
        raise ValueError(f"{duration!r} is not a positive duration; write for example 90s, 10m or 1h30m")
    return total


@functools.cache
def parse_interval(interval: int | str) -> Interval:
    """Parse `5000` or `"5000 steps"`, `"10 episodes"`, `"100 updates"`, or a duration such as `"60 s"`.

    The number 0 disables what the interval is for. Raises `ValueError` for any other text.
    """
    if isinstance(interval, int):
        if interval < 0:
            raise ValueError(_message(interval))
        return Interval(interval, "steps")
    match = re.fullmatch(r"(\d+) *(step|episode|update)s?", interval, re.ASCII)
    if match is not None and int(match[1]) > 0:
        return Interval(int(match[1]), match[2] + "s")  # type: ignore[arg-type]
    try:
        return Interval(parse_duration(interval.replace(" ", "")), "seconds")
    except ValueError:
        raise ValueError(_message(interval)) from None


def _message(interval: object) -> str:
    return (
        f"{interval!r} is not an interval; write a number of steps, such as 5000, or '10 episodes', '100 updates' or "
        f"'60 s'"
    )


def check_interval(interval: object) -> int | str:
    """Return a valid interval as it is; raise `ValueError` for any other value."""
    if isinstance(interval, float) and interval.is_integer():
        interval = int(interval)  # 1e4
    if isinstance(interval, bool) or not isinstance(interval, (int, str)):
        raise ValueError(_message(interval))
    parse_interval(interval)
    return interval


def check_positive_interval(interval: object) -> int | str:
    """Like `check_interval`, but don't allow 0."""
    if interval == 0:
        raise ValueError("must be greater than 0")
    return check_interval(interval)


def check_train_every(interval: object) -> int | str:
    """Like `check_positive_interval`, but only allow steps and episodes."""
    valid = check_positive_interval(interval)
    if parse_interval(valid).unit not in ("steps", "episodes"):
        raise ValueError(f"{interval!r} is not a number of steps or episodes; write for example 4 or '1 episode'")
    return valid
