"""Commands that use environments without an agent."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from zhixing.cli.arguments import translate_options
from zhixing.cli.completion import complete_env
from zhixing.cli.options import Imports, Seed, Trust, WindowEpisodes
from zhixing.errors import UserError


def play(
    env: Annotated[
        str,
        typer.Argument(
            metavar="ENV",
            help="Environment, such as CartPole-v1, or a run whose environment to play.",
            autocompletion=complete_env,
        ),
    ],
    settings: Annotated[
        list[str] | None,
        typer.Argument(metavar="env.NAME=VALUE", help="Environment options, such as env.action_repeat=1."),
    ] = None,
    random: Annotated[
        bool, typer.Option("--random", help="Play random actions instead of reading the keyboard.")
    ] = False,
    episodes: WindowEpisodes = None,
    seed: Seed = 0,
    imports: Imports = None,
    trust: Trust = False,
) -> None:
    """Play an environment in a window with the keyboard. Escape closes it."""
    from zhixing.envs.adapters.gymnasium_ids import import_packages
    from zhixing.reports.viewer import play

    options = _env_options("play", settings)
    if Path(env, "config.yaml").is_file():
        from zhixing.training.run_folder import RunFolder

        folder = RunFolder.open(env)
        saved = folder.read_config().env
        with folder.restricted():
            play(saved.name, {**saved.options, **options}, random=random, seed=seed, episodes=episodes)
        return
    import_packages(imports or [])
    play(env, options, random=random, seed=seed, episodes=episodes)


def check(
    env: Annotated[
        str,
        typer.Argument(
            metavar="ENV",
            help="Environment, such as my.module:MyEnv.",
            autocompletion=complete_env,
        ),
    ],
    settings: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="env.NAME=VALUE", help="Environment options; env.render_mode=rgb_array also checks rendering."
        ),
    ] = None,
    imports: Imports = None,
) -> None:
    """Check that an environment follows the Gymnasium API."""
    from zhixing import envs
    from zhixing.envs.adapters.gymnasium_ids import import_packages

    import_packages(imports or [])
    results = envs.check_env(env, **_env_options("check", settings))
    for result in results:
        first, *rest = result.message.rstrip().splitlines()
        print(f"{result.status:8} {result.check:13} {first}")
        for line in rest:
            print(f"{'':22} {line}")
    errors = sum(result.status == "error" for result in results)
    print(f"{env}: {errors or 'no'} error{'' if errors == 1 else 's'}")
    if errors:
        raise typer.Exit(2)


def reproduce(
    crash: Annotated[Path, typer.Argument(metavar="CRASH", help="Crash report: a file in the folder crash/ of a run.")],
    env: Annotated[
        str | None,
        typer.Option("--env", metavar="ENV", help="Allow the import of this environment, if the report names it."),
    ] = None,
    imports: Imports = None,
    trust: Trust = False,
) -> None:
    """Repeat the episode in which an environment crashed, with the same seed and actions."""
    from zhixing.envs.adapters.gymnasium_ids import import_packages
    from zhixing.envs.crash import crash_report

    import_packages(imports or [])
    reproduction = crash_report.reproduce(crash, env)
    if reproduction.traceback:
        print(reproduction.traceback.rstrip())
    print(reproduction.message)
    if not reproduction.same:
        raise typer.Exit(1)


def _env_options(command: str, settings: list[str] | None) -> dict[str, Any]:
    from zhixing import config

    values = config.parse_overrides(translate_options(settings or [], None))
    options = values.pop("env", {})
    if not isinstance(options, dict):
        raise UserError(
            f"env={options!r}: `zhixing {command}` accepts only options of the environment, written env.NAME=VALUE"
        )
    return {**values, **options}  # `env.` may be omitted, since there are no other settings
