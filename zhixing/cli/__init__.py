"""The command line. Commands import modules that need torch when they run, so `--help` is fast."""

from __future__ import annotations

import os
import sys
from typing import Annotated, Any

import typer

from zhixing import __version__
from zhixing.cli.agents import collect, evaluate, export, pull, push, video, watch, zoo
from zhixing.cli.arguments import SettingsCommand
from zhixing.cli.environments import check, play, reproduce
from zhixing.cli.experiments import plot, profile, sweep, tune
from zhixing.cli.listing import list_, show
from zhixing.cli.training import resume, train
from zhixing.cli.translated_help import translate_help
from zhixing.errors import (
    SYSTEM_ERRORS,
    EnvCrashError,
    UserError,
    describe_system_error,
    discard_broken_streams,
    escape_unprintable,
    write_stderr,
)
from zhixing.translation import LANGUAGES, VARIABLE, language

app = typer.Typer(
    name="zhixing",
    help="Deep reinforcement learning: train, evaluate, resume, plot and record agents.",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
# in the order of `zhixing --help`
app.command(cls=SettingsCommand)(train)
app.command(cls=SettingsCommand)(resume)
app.command("eval")(evaluate)
app.command()(collect)
app.command()(video)
app.command()(export)
app.command()(push)
app.command()(pull)
app.command()(zoo)
app.command()(watch)
app.command(cls=SettingsCommand)(play)
app.command(cls=SettingsCommand)(check)
app.command()(reproduce)
app.command()(plot)
app.command(cls=SettingsCommand)(sweep)
app.command(cls=SettingsCommand)(tune)
app.command(cls=SettingsCommand)(profile)
app.command("list")(list_)
app.command()(show)


def _print_version(requested: bool) -> None:
    if requested:
        print(f"zhixing {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Define the options of `zhixing` itself."""


def main() -> None:
    """Run the command line. Invalid input prints one message and exits with code 2; an interrupt exits with 130."""
    escape_unprintable()
    try:
        arguments = sys.argv[1:] or ["--help"]
        _check_language()
        command = typer.main.get_command(app)
        if language() != "en" and {"-h", "--help"} & set(arguments):
            translate_help(command)
        # returns 130 after an interrupt
        code = command(arguments, prog_name="zhixing", standalone_mode=False) or 0
        if sys.stdout is not None:
            sys.stdout.flush()  # reports a full disk now
    except UserError as error:
        code = _fail(str(error), 2)
    except EnvCrashError as error:
        code = _fail(str(error), 1)
    except KeyboardInterrupt:
        code = 130
    except BrokenPipeError:  # the reader of the output, such as head, has ended
        code = 1
    except OSError as error:
        if error.errno not in SYSTEM_ERRORS and error.filename is None:
            raise
        code = _fail(describe_system_error(error), 1 if error.filename is None else 2)
    except Exception as error:
        if not hasattr(error, "format_message"):
            raise
        code = _fail(_usage_error(error), 2)
    discard_broken_streams()
    if code:
        sys.exit(code)


def _check_language() -> None:
    name = os.environ.get(VARIABLE, "")
    if name and name.lower()[:2] not in LANGUAGES:
        allowed = " and ".join(LANGUAGES)
        raise UserError(f"{VARIABLE}={name!r}: allowed are {allowed}; without it, the locale determines the language")


def _usage_error(error: Any) -> str:
    """Return the message of an error that typer raises for invalid arguments."""
    command = "zhixing" if getattr(error, "ctx", None) is None else error.ctx.command_path
    return f"{error.format_message().rstrip('.')} (see `{command} --help`)"


def _fail(message: str, code: int) -> int:
    write_stderr(f"error: {message}")
    return code
