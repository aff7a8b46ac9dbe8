"""Reading YAML: numbers such as 3e-4, bounded sizes, and errors that people understand."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from zhixing.errors import UserError
from zhixing.utils.bounds import check_size

LARGEST = 1 << 20  # bytes of a configuration


class _Loader(yaml.SafeLoader):
    """YAML in which `3e-4` is a number, as everywhere else, and whose references don't multiply without end."""

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        super().flatten_mapping(node)
        if len(node.value) > 10_000:
            raise yaml.constructor.ConstructorError(problem="it merges itself again and again")


_Loader.yaml_implicit_resolvers = {k: list(v) for k, v in yaml.SafeLoader.yaml_implicit_resolvers.items()}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
)


def parse_yaml(text: str, where: str) -> Any:
    try:
        values = yaml.load(text, _Loader)  # a SafeLoader
        check_size(values, len(text))
        return values
    # its constructors let many errors through, on values such as `!!bool x`
    except (yaml.YAMLError, ValueError, LookupError, AttributeError, TypeError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        line = f" at line {mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or str(error).split("\n")[0] or type(error).__name__
        raise UserError(f"{where} is not readable YAML{line}: {problem}") from None


def read_yaml(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > LARGEST:
            raise UserError(f"the configuration file {path} is larger than {LARGEST >> 20} MB")
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"there is no configuration file {path}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"the configuration file {path} can't be read: {error}") from None
    values = parse_yaml(text, str(path))
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise UserError(f"{path} must hold settings, one `name: value` per line; it holds {type(values).__name__}")
    return values
