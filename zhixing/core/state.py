"""Checks of the names and types in a saved state, because a checkpoint may come from an untrusted source."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from zhixing.errors import UserError

Count = Annotated[int, Field(ge=0, lt=2**63)]

_ANY = ConfigDict(arbitrary_types_allowed=True)


def check_state(owner: str, state: Any, types: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state as a dict. Raise `UserError` for a name that isn't in `types`, or a value of another type.

    `owner` names the object in messages. Names may be missing, because older versions saved fewer.
    """
    if not isinstance(state, Mapping):
        raise UserError(f"the saved state of {owner} is a {type(state).__name__}; expected a dict")
    for name, value in state.items():
        if name not in types:
            raise UserError(f"the saved state of {owner} has the name {str(name)[:80]!r}; allowed: {', '.join(types)}")
        try:
            TypeAdapter(types[name], config=_ANY).validate_python(value, strict=True)
        except ValidationError as error:
            reason = error.errors()[0]["msg"]
            raise UserError(f"the saved state of {owner} has {name}={str(value)[:80]!r}: {reason}") from None
    return dict(state)


def read_count(owner: str, state: Mapping[str, Any], name: str) -> int:
    """Return a non-negative integer of a state."""
    return int(check_state(owner, {name: state[name]}, {name: Count})[name])
