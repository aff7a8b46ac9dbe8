"""Commands that list algorithms, environments, presets and settings."""

from __future__ import annotations

from typing import Annotated

import typer

from zhixing.cli.completion import complete_algorithm, complete_env, complete_kind
from zhixing.cli.options import Imports


def list_(
    kind: Annotated[
        str,
        typer.Argument(
            metavar="KIND",
            help="What to list: algorithms, envs or presets.",
            autocompletion=complete_kind,
        ),
    ] = "algorithms",
    imports: Imports = None,
) -> None:
    """List algorithms, environments or presets."""
    from zhixing import algorithms, config
    from zhixing.envs.adapters.gymnasium_ids import import_packages
    from zhixing.errors import unknown

    if kind == "algorithms":
        for name in algorithms.names():
            print(f"{name:16} {algorithms.get(name).summary}")
    elif kind == "envs":
        import_packages(imports or [])
        _list_envs()
    elif kind == "presets":
        for name in algorithms.names():
            for env in config.presets(name):
                print(f"{name:16} {env}")
    else:
        raise unknown("kind", kind, ["algorithms", "envs", "presets"])


def _list_envs() -> None:
    import shutil
    import textwrap

    from zhixing.envs.catalog import families

    width = min(120, shutil.get_terminal_size((120, 24)).columns)
    for family in families():
        print(f"{family.title} - {family.missing or 'installed'}")
        names = textwrap.fill("  ".join(family.names), width - 2, break_on_hyphens=False, break_long_words=False)
        print(textwrap.indent(names or "none", "  "))
    print("To use your own environment, write my.module:MyEnv or my_env.py:MyEnv.")
    print("To use one that a package registers with Gymnasium, write package:Id-v0, or Id-v0 with --import PACKAGE.")


def show(
    algorithm: Annotated[
        str,
        typer.Argument(
            metavar="ALGO",
            help="Algorithm, such as ppo.",
            autocompletion=complete_algorithm,
        ),
    ],
    env: Annotated[
        str | None,
        typer.Option(
            "--env",
            metavar="ENV",
            help="Also print the preset values for this environment.",
            autocompletion=complete_env,
        ),
    ] = None,
    imports: Imports = None,
) -> None:
    """Print the settings of an algorithm with types, defaults and descriptions."""
    from zhixing import algorithms, config
    from zhixing.config.display import print_settings
    from zhixing.envs.adapters.gymnasium_ids import import_packages
    from zhixing.envs.registry import check_name

    name, _, _, model, _ = algorithms.get(algorithm)
    import_packages(imports or [])
    if env is None:
        print_settings(name, model)
        return
    check_name(env)
    preset = config.preset_name(name, env)
    title = f"{name} on {env}: {'no preset' if preset is None else f'preset {preset}'}"
    print_settings(title, model, config.build([{"algorithm": name, "env": env}], {}))
