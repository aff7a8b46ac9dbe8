"""Candidates of shell completion. Nothing here imports torch, so the shell doesn't wait."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from zhixing.cli.source_settings import SourceSetting, algorithm_summaries, read_settings

Candidates = list[tuple[str, str]]  # values with descriptions


def complete_algorithm(incomplete: str) -> Candidates:
    return [(name, summary) for name, summary in algorithm_summaries().items() if name.startswith(incomplete)]


def complete_env(incomplete: str) -> list[str]:
    from zhixing.envs.catalog import families

    names = [name for family in families() if not family.missing for name in family.names]
    return sorted(name for name in names if name.startswith(incomplete))


def complete_setting(ctx: typer.Context, incomplete: str) -> Candidates:
    """Return setting names with `=`, or after it, values. Settings are those of the algorithm or run in the command."""
    settings = _settings(ctx)
    name, sign, value = incomplete.partition("=")
    before = _last_word(ctx)
    if sign or before in settings:  # bash splits words at `=`, and completes only the part after it
        prefix = f"{name}=" if sign else ""
        values = _values(settings.get(name if sign else before))
        start = value if sign else incomplete
        return [(prefix + text, description) for text, description in values if text.startswith(start)]
    matches = {name: setting for name, setting in settings.items() if name.startswith(incomplete)}
    if len(matches) == 1:  # a single candidate would be followed by a space
        ((name, setting),) = matches.items()
        return [(f"{name}=", setting.description), *((f"{name}={text}", about) for text, about in _values(setting))]
    return [(f"{name}=", setting.description) for name, setting in matches.items()]


def complete_run(incomplete: str) -> list[str]:
    """Return run folders, up to two levels below the folder that is typed, and the names of bundled agents."""
    typed = incomplete.rpartition("/")[0] + "/" if "/" in incomplete else ""
    folder = Path(typed or ".").expanduser()
    runs = {typed + str(run.relative_to(folder)) for run in _find_runs(folder, 2)}
    if not typed:
        from zhixing.utils.files import bundled_agents

        runs |= {path.parent.name for path in bundled_agents().glob("*/agent.json")}
    return sorted(run for run in runs if run.startswith(incomplete))


def complete_checkpoint(incomplete: str) -> list[str]:
    return [name for name in ("last", "best") if name.startswith(incomplete)]


def complete_kind(incomplete: str) -> list[str]:
    return [kind for kind in ("algorithms", "envs", "presets") if kind.startswith(incomplete)]


def complete_format(incomplete: str) -> list[str]:
    return [name for name in ("folder", "onnx", "torch") if name.startswith(incomplete)]


def _find_runs(folder: Path, depth: int) -> Iterator[Path]:
    try:
        children = [path for path in folder.iterdir() if path.is_dir() and not path.name.startswith(".")]
    except OSError:
        return
    for child in children:
        if (child / "config.yaml").is_file():
            yield child
        elif depth > 1:
            yield from _find_runs(child, depth - 1)


def _settings(ctx: typer.Context) -> dict[str, SourceSetting]:
    """Return the settings of the algorithm in the command, of the run that it names, or of all algorithms."""
    words: list[Any] = [ctx.params.get("algorithm"), *(ctx.params.get("settings") or ())]
    names = [str(word) for word in words if word and "=" not in word]
    if ctx.params.get("run"):
        names = [_algorithm_of_run(Path(ctx.params["run"]))]
    for name in names:
        settings = read_settings(name.lower())
        if settings:
            return settings
    return {} if names else {k: v for algorithm in algorithm_summaries() for k, v in read_settings(algorithm).items()}


def _algorithm_of_run(run: Path) -> str:
    try:
        match = re.search(r"^algorithm: (\w+)$", (run / "config.yaml").read_text(encoding="utf-8"), re.M)
    except (OSError, UnicodeDecodeError):
        return ""
    return match[1] if match else ""


def _last_word(ctx: typer.Context) -> str:
    """Return the word before the one to complete, or before a separate `=`."""
    words = [str(word) for word in ctx.params.get("settings") or () if word != "="]
    return words[-1] if words else ""


def _values(setting: SourceSetting | None) -> Candidates:
    if setting is None:
        return []
    default = setting.default.strip("'\"").replace(" ", "")
    default = {"None": "none", "True": "true", "False": "false"}.get(default, default)
    values = {text: "default" if text == default else "" for text in (*setting.choices, default) if text}
    return list(values.items())
