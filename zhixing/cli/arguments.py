"""Settings on the command line: `lr=3e-4`, or `--lr 3e-4` as in other libraries."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from typer.core import TyperCommand

from zhixing.errors import UserError, note

_SETTING = re.compile(r"[A-Za-z_][\w.]*=")


class SettingsCommand(TyperCommand):
    """A command that takes settings. Unknown options are settings: `--env-steps 1000` is `env_steps=1000`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        is_flag: dict[str, bool] = {}
        for option in self.get_params(ctx):
            if option.param_type_name == "option":
                names = (*option.opts, *option.secondary_opts)
                is_flag |= dict.fromkeys(names, bool(getattr(option, "is_flag", False)))
        try:
            args = reorder_arguments(args, is_flag, reject_typos=not ctx.resilient_parsing)
        except UserError:
            if not ctx.resilient_parsing:  # for shell completion, arguments may be incomplete
                raise
        return super().parse_args(ctx, args)


def read_layers(
    algorithm: str | None, settings: list[str] | None, config_files: list[Path] | None, **options: Any
) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the settings of files and options as layers, and the `name=value` arguments that override them."""
    from zhixing import config

    arguments = [argument for argument in (algorithm, *(settings or [])) if argument is not None]
    # settings may precede the algorithm, which a configuration file may name instead
    plain = (i for i, argument in enumerate(arguments) if "=" not in argument and not argument.startswith("-"))
    position = next(plain, None)
    options = {"algorithm": None if position is None else arguments.pop(position), **options}
    layers = [config.read_yaml(file) for file in config_files or []]
    layers.append({name: value for name, value in options.items() if value is not None})
    algorithm = next((layer["algorithm"] for layer in reversed(layers) if "algorithm" in layer), None)
    return layers, translate_options(arguments, algorithm if isinstance(algorithm, str) else None)


def reorder_arguments(args: Sequence[str], is_flag: dict[str, bool], *, reject_typos: bool = True) -> list[str]:
    """Return the command's options, `--`, and all other arguments, with unknown options written `--name=value`.

    `is_flag` has the names of the command's options and whether an option takes no value.
    """
    options: list[str] = []
    others: list[str] = []
    rest = list(args)
    while rest:
        argument = rest.pop(0)
        name, sign, _ = argument.partition("=")
        if argument == "--":
            others += rest
            break
        if name in is_flag:
            options.append(argument)
            if not sign and not is_flag[name]:
                if not rest:
                    raise UserError(f"option {name} needs a value: write {name} VALUE")
                options.append(rest.pop(0))
        elif argument.startswith("--"):
            if reject_typos:
                _reject_typo(name, list(is_flag))
            value_follows = bool(rest) and not rest[0].startswith("--") and not _SETTING.match(rest[0])
            others.append(f"{argument}={rest.pop(0)}" if not sign and value_follows else argument)
        elif re.match(r"-[A-Za-z]", argument):
            options.append(argument)  # the command rejects it
        else:
            others.append(argument)
    return [*options, "--", *join_brackets(others)] if others else options


def join_brackets(args: Sequence[str]) -> list[str]:
    """Join arguments that the shell split inside brackets: `["sizes=[64,", "64]"]` is `["sizes=[64, 64]"]`."""
    joined: list[str] = []
    depth = 0
    for argument in args:
        if depth > 0:
            joined[-1] += f" {argument}"
        else:
            joined.append(argument)
        depth = sum(joined[-1].count(sign) for sign in "[{") - sum(joined[-1].count(sign) for sign in "]}")
    return joined


def _reject_typo(name: str, options: list[str]) -> None:
    """Raise `UserError` if an unknown option resembles one of the command's options and is not a setting."""
    closest = difflib.get_close_matches(name, options, n=1, cutoff=0.8)
    if closest and "." not in name and not _is_known(name.removeprefix("--").replace("-", "_")):
        raise UserError(f"unknown option {name}: did you mean {closest[0]}?")


def translate_options(args: Sequence[str], algorithm: str | None) -> list[str]:
    """Rewrite options such as `--lr=3e-4` as settings of the algorithm, `lr=3e-4`.

    Settings of other libraries are translated, with a note, if their value has the same meaning.
    """
    return [_translate(argument, algorithm) if argument.startswith("--") else argument for argument in args]


def _translate(argument: str, algorithm: str | None) -> str:
    from zhixing.config import has_setting
    from zhixing.config.other_libraries import LIBRARY_SETTINGS

    option, sign, value = argument.partition("=")
    name = option.removeprefix("--").replace("-", "_")
    models = list(_models(algorithm))
    known = LIBRARY_SETTINGS.get(name)
    if known is not None and not known.difference and not any(has_setting(model, name) for model in models):
        candidates = (setting for setting in known.equivalents for model in models if has_setting(model, setting))
        equivalent = next(candidates, None)
        if equivalent is not None:
            note(known.message(option, equivalent))
            name = equivalent
    if sign:
        return f"{name}={value}"
    for switch, state in ((name, "true"), (name.removeprefix("no_"), "false")):
        if _is_bool(switch):
            return f"{switch}={state}"
    if _is_known(name):
        raise UserError(f"{option} needs a value: write {option} VALUE or {name}=VALUE")
    return f"{name}=true"


def _models(algorithm: str | None) -> Iterator[Any]:
    """Yield the settings class of an algorithm; with None, of all algorithms."""
    from zhixing import algorithms

    for name in algorithms.names() if algorithm is None else [algorithm]:
        yield algorithms.get(name).settings


def _is_known(name: str) -> bool:
    """Return whether any algorithm or another library has a setting of this name."""
    from zhixing.config import has_setting
    from zhixing.config.other_libraries import LIBRARY_SETTINGS

    return name in LIBRARY_SETTINGS or any(has_setting(model, name) for model in _models(None))


def _is_bool(name: str) -> bool:
    from zhixing.config import setting_type

    return any(setting_type(model, name) is bool for model in _models(None))
