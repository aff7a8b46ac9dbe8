"""The help of commands and options in the language of the user."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from zhixing.translation import translate

# the titles and labels that typer prints around the help
LABELS = (
    "ARGUMENTS_PANEL_TITLE",
    "OPTIONS_PANEL_TITLE",
    "COMMANDS_PANEL_TITLE",
    "DEFAULT_STRING",
    "REQUIRED_LONG_STRING",
)


def translate_help(group: Any) -> None:
    """Translate the help of the commands of a group in place."""
    from typer import rich_utils

    class FoldingHighlighter(rich_utils.OptionHighlighter):
        """Let lines break anywhere: Chinese has no spaces, and a table cuts words that are longer than a line."""

        def __call__(self, text: Any) -> Any:
            highlighted = super().__call__(text)
            highlighted.overflow = "fold"
            return highlighted

    rich_utils.highlighter = FoldingHighlighter()
    for label in LABELS:
        setattr(rich_utils, label, translate(getattr(rich_utils, label)))
    for part, field in help_texts(group):
        setattr(part, field, "\n\n".join(map(translate, paragraphs(getattr(part, field)))))


def help_texts(group: Any) -> Iterator[tuple[Any, str]]:
    """Yield the commands and options of a group that have help, with the names of the attributes that hold it."""
    parent = group.make_context(group.name, [], resilient_parsing=True)
    for command in (group, *group.commands.values()):
        context = command.make_context(command.name, [], parent, resilient_parsing=True)
        for part in (command, *command.get_params(context)):
            for field in ("help", "show_default"):
                if isinstance(getattr(part, field, None), str):
                    yield part, field


def paragraphs(text: str) -> list[str]:
    """Return the paragraphs of a help text, each in one line."""
    return [" ".join(paragraph.split()) for paragraph in text.split("\n\n")]
