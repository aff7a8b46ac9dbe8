"""Read YAML with a bounded size, numbers such as 3e-4 and short errors."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from zhixing.errors import UserError
from zhixing.utils.bounds import check_size

MAX_CONFIG_BYTES = 1 << 20


class _Loader(yaml.SafeLoader):
    """Read `3e-4` as a number, and reject aliases that multiply the size of the document."""

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        super().flatten_mapping(node)
        if len(node.value) > 10_000:
            raise yaml.constructor.ConstructorError(problem="its merge keys expand to more than 10,000 entries")


_Loader.yaml_implicit_resolvers = {k: list(v) for k, v in yaml.SafeLoader.yaml_implicit_resolvers.items()}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
)


def parse_yaml(text: str, source: str) -> Any:
    """Return the value of a YAML text. An error names the `source` of the text and the line."""
    try:
        values = yaml.load(text, _Loader)  # a SafeLoader
        check_size(values, len(text))
        return values
    # the constructors raise these on values such as `!!bool x`
    except (yaml.YAMLError, ValueError, LookupError, AttributeError, TypeError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        line = f" at line {mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or str(error).split("\n")[0] or type(error).__name__
        raise UserError(f"{source} is not valid YAML{line}: {problem}") from None


def read_yaml(path: Path) -> dict[str, Any]:
    """Return the settings in a configuration file."""
    try:
        if path.stat().st_size > MAX_CONFIG_BYTES:
            raise UserError(
                f"the configuration file {path} is larger than {MAX_CONFIG_BYTES >> 20} MB; keep only settings in it"
            )
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"there is no configuration file {path}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"the configuration file {path} can't be read: {error}") from None
    values = parse_yaml(text, str(path))
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise UserError(
            f"{path} must contain settings, one `name: value` per line; it contains {type(values).__name__}"
        )
    return values
