"""Saved state that is read back. A checkpoint may be a stranger's: its names and types are checked, value by value."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from zhixing.errors import UserError

Count = Annotated[int, Field(ge=0, lt=2**63)]

_ANY = ConfigDict(arbitrary_types_allowed=True)


def check_state(owner: str, state: Any, types: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a state. Raise `UserError` for a name that isn't in `types`, or a value of another type.
    Names may be missing: older versions saved fewer."""
    if not isinstance(state, Mapping):
        raise UserError(f"the saved state of {owner} is a {type(state).__name__}, expected names and values")
    for name, value in state.items():
        if name not in types:
            raise UserError(f"the saved state of {owner} has a value {str(name)[:80]!r}; allowed: {', '.join(types)}")
        try:
            TypeAdapter(types[name], config=_ANY).validate_python(value, strict=True)
        except ValidationError as error:
            reason = error.errors()[0]["msg"]
            raise UserError(f"the saved state of {owner} has {name}={str(value)[:80]!r}: {reason}") from None
    return dict(state)


def read_count(owner: str, state: Mapping[str, Any], name: str) -> int:
    """Return a number of a state that counts something."""
    return int(check_state(owner, {name: state[name]}, {name: Count})[name])
