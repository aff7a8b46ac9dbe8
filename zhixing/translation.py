"""Chinese messages and help, with ZHIXING_LANG=zh or a locale whose name begins with zh.

Messages are English in the code, and translated when they are shown. The catalogs in `locale/zh` have pairs of lines:
an English template and its translation. `{}` stands for a value, which may itself be a message with a translation.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from pathlib import Path
from string import Formatter
from typing import NamedTuple

LANGUAGES = ("en", "zh")
VARIABLE = "ZHIXING_LANG"
LOCALE_VARIABLES = ("LC_ALL", "LC_MESSAGES", "LANG")  # the first that is set determines the language
CATALOGS = Path(__file__).parent / "locale" / "zh"


class Template(NamedTuple):
    """A message with placeholders: the text around them, and the translation."""

    parts: tuple[str, ...]
    translation: str

    def match(self, text: str) -> list[str] | None:
        """Return the values of the placeholders in a message, or None if it is another message."""
        first, *middle, last = self.parts
        start, end = len(first), len(text) - len(last)
        if start > end or not text.startswith(first) or not text.endswith(last):
            return None
        values = []
        for part in middle:
            position = text.find(part, start, end)
            if position < 0:
                return None
            values.append(text[start:position])
            start = position + len(part)
        return [*values, text[start:end]]


class Catalog(NamedTuple):
    messages: dict[str, str]  # without placeholders
    templates: list[Template]  # those with the longest text first, because they are the most specific


def language(environ: Mapping[str, str] = os.environ) -> str:
    """Return the language of messages and help: zh, or en for all others."""
    names = (environ[name] for name in (VARIABLE, *LOCALE_VARIABLES) if environ.get(name))
    return "zh" if next(names, "").lower().startswith("zh") else "en"


def translate(text: str) -> str:
    """Return a message or help text in the language of the user; without a translation, as it is."""
    return _translate(text, read_catalog()) if language() == "zh" else text


def read_pairs(file: Path) -> list[tuple[str, str]]:
    """Return the English and Chinese lines of a catalog."""
    lines = [line for line in file.read_text(encoding="utf-8").splitlines() if line and not line.startswith("# ")]
    return [(english.replace("\\n", "\n"), chinese.replace("\\n", "\n")) for english, chinese in _in_pairs(lines)]


def _in_pairs(lines: list[str]) -> list[tuple[str, str]]:
    return list(zip(lines[::2], lines[1::2], strict=True))


@functools.cache
def read_catalog() -> Catalog:
    messages, templates = {}, []
    for file in sorted(CATALOGS.glob("*.txt")):
        for english, chinese in read_pairs(file):
            parts = split_template(english)
            if len(parts) == 1:
                messages[parts[0].strip()] = chinese.strip().format()
            else:
                templates.append(Template(parts, chinese))
    templates.sort(key=lambda template: -sum(map(len, template.parts)))
    return Catalog(messages, templates)


def split_template(template: str) -> tuple[str, ...]:
    """Return the text before, between and after the placeholders of a template."""
    parts = [""]
    for text, field, _, _ in Formatter().parse(template):
        parts[-1] += text
        if field is not None:
            parts.append("")
    return tuple(parts)


def _translate(text: str, catalog: Catalog) -> str:
    message = text.strip()
    if not message:
        return text
    translation = catalog.messages.get(message)
    if translation is None:
        translation = _translate_parts(message, catalog)
    return text.replace(message, translation, 1)


def _translate_parts(message: str, catalog: Catalog) -> str:
    """Translate a message with values in it, a list of messages, or a message after a value and a colon."""
    for template in catalog.templates:
        values = template.match(message)
        if values is not None and not ("\n" in message and "\n" not in "".join(template.parts)):
            return template.translation.format(*(_translate(value, catalog) for value in values))
    for separator in ("\n", "; ", ": "):
        first, found, rest = message.partition(separator)
        if found:
            return _translate(first, catalog) + separator + _translate(rest, catalog)
    return message
