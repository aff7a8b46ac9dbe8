"""Settings on the command line: `lr=3e-4`, and `--lr 3e-4` as other libraries write it."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence
from typing import Any

from typer.core import TyperCommand

from zhixing.errors import UserError, note

_SETTING = re.compile(r"[A-Za-z_][\w.]*=")


class SettingsCommand(TyperCommand):
    """A command that takes settings. Options that it doesn't have are settings: `--env-steps 1000` is
    `env_steps=1000`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        flags: dict[str, bool] = {}  # options of the command: whether they stand alone
        for option in self.get_params(ctx):
            if option.param_type_name == "option":
                names = (*option.opts, *option.secondary_opts)
                flags |= dict.fromkeys(names, bool(getattr(option, "is_flag", False)))
        return super().parse_args(ctx, split_arguments(args, flags))


def split_arguments(args: Sequence[str], flags: dict[str, bool]) -> list[str]:
    """Put a command's options first, then `--`, then all other words with unknown options as `--name=value`."""
    options: list[str] = []
    words: list[str] = []
    rest = list(args)
    while rest:
        word = rest.pop(0)
        name, sign, _ = word.partition("=")
        if word == "--":
            words += rest
            break
        if name in flags:
            options.append(word)
            if not sign and not flags[name]:
                if not rest:
                    raise UserError(f"option {name} needs a value: write {name} VALUE")
                options.append(rest.pop(0))
        elif word.startswith("--"):
            _reject_typo(name, list(flags))
            valued = bool(rest) and not rest[0].startswith("--") and not _SETTING.match(rest[0])
            words.append(f"{word}={rest.pop(0)}" if not sign and valued else word)
        elif re.match(r"-[A-Za-z]", word):
            options.append(word)  # which the command rejects
        else:
            words.append(word)
    return [*options, "--", *join_brackets(words)] if words else options


def join_brackets(words: Sequence[str]) -> list[str]:
    """Join what the shell has split inside brackets: `["sizes=[64,", "64]"]` is `["sizes=[64, 64]"]`."""
    joined: list[str] = []
    depth = 0
    for word in words:
        if depth > 0:
            joined[-1] += f" {word}"
        else:
            joined.append(word)
        depth = sum(joined[-1].count(sign) for sign in "[{") - sum(joined[-1].count(sign) for sign in "]}")
    return joined


def _reject_typo(name: str, options: list[str]) -> None:
    """Raise `UserError` where an unknown option looks like one of the command's and like no setting."""
    near = difflib.get_close_matches(name, options, n=1, cutoff=0.8)
    if near and "." not in name and not _is_known(name.removeprefix("--").replace("-", "_")):
        raise UserError(f"unknown option {name}: did you mean {near[0]}?")


def settings_of(words: Sequence[str], algorithm: str | None) -> list[str]:
    """Return words with options such as `--lr=3e-4` written as settings of the algorithm, `lr=3e-4`.

    Names of other libraries are translated, with a note, where they mean the same.
    """
    return [_setting(word, algorithm) if word.startswith("--") else word for word in words]


def _setting(word: str, algorithm: str | None) -> str:
    from zhixing.config import has_setting
    from zhixing.config.other_libraries import OTHER_NAMES

    option, sign, value = word.partition("=")
    name = option.removeprefix("--").replace("-", "_")
    models = list(_models(algorithm))
    other = OTHER_NAMES.get(name)
    if other is not None and not any(has_setting(model, name) for model in models):
        here = next((one for one in other.here for model in models if has_setting(model, one)), None)
        if here is not None and not other.difference:
            note(f"{other.sentence(option, here)}")
            name = here
    if sign:
        return f"{name}={value}"
    for switch, on in ((name, "true"), (name.removeprefix("no_"), "false")):
        if _is_switch(switch):
            return f"{switch}={on}"
    if _is_known(name):
        raise UserError(f"{option} needs a value: write {option} VALUE or {name}=VALUE")
    return f"{name}=true"


def _models(algorithm: str | None) -> Iterator[Any]:
    """Yield the settings of the algorithm, or of all algorithms where none is named."""
    from zhixing import algorithms

    for name in algorithms.names() if algorithm is None else [algorithm]:
        yield algorithms.get(name).settings


def _is_known(name: str) -> bool:
    """Return whether any algorithm, or another library, has such a setting."""
    from zhixing.config import has_setting
    from zhixing.config.other_libraries import OTHER_NAMES

    return name in OTHER_NAMES or any(has_setting(model, name) for model in _models(None))


def _is_switch(name: str) -> bool:
    from zhixing.config import setting_type

    return any(setting_type(model, name) is bool for model in _models(None))
