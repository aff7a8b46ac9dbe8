"""Reading JSON of strangers."""

from __future__ import annotations

import sys

import pytest

from zhixing.utils.files import MAX_JSON_DEPTH, parse_json


def test_json_is_read_up_to_a_depth_whatever_the_recursion_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    def nested(depth: int) -> str:
        return '{"a": [' * (depth // 2) + "1" + "]}" * (depth // 2)

    value = parse_json(nested(MAX_JSON_DEPTH))
    for _ in range(MAX_JSON_DEPTH // 2):
        (value,) = value["a"]
    assert value == 1
    limit = sys.getrecursionlimit()
    try:
        sys.setrecursionlimit(20_000)  # as some packages do when they are imported
        with pytest.raises(ValueError, match="nested more than 100 levels deep"):
            parse_json(nested(5_000))
    finally:
        sys.setrecursionlimit(limit)
