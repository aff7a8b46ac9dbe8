"""Names of datasets: valid ones are opened, others rejected with suggestions."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from dataset_streams import record_dataset

from zhixing import offline
from zhixing.errors import UserError
from zhixing.offline import Dataset


def test_a_folder_is_opened_by_name_or_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record_dataset(tmp_path / "expert")
    monkeypatch.chdir(tmp_path)
    assert len(offline.open("expert")) == len(offline.open(tmp_path / "expert")) == len(offline.open("./expert/")) == 60
    assert isinstance(offline.open("expert"), Dataset)


def test_env_applies_only_to_data_without_one(tmp_path: Path) -> None:
    record_dataset(tmp_path / "unknown")
    record_dataset(tmp_path / "known", env="a:A", options={"x": 1})
    data = offline.open(tmp_path / "unknown", env="b:B", options={"y": 2})
    assert (data.env, data.options) == ("b:B", {"y": 2})
    data = offline.open(tmp_path / "known", env="b:B", options={"y": 2})
    assert (data.env, data.options) == ("a:A", {"x": 1})
    offline.convert(tmp_path / "unknown", tmp_path / "copy", env="b:B")
    assert offline.open(tmp_path / "copy").env == "b:B"
    offline.convert(offline.open(tmp_path / "unknown"), tmp_path / "another", env="b:B")
    assert offline.open(tmp_path / "another").env == "b:B"


def test_other_files_and_folders_are_rejected(tmp_path: Path) -> None:
    allowed = "allowed are a folder that zhixing or Minari wrote, minari:NAMESPACE/NAME-v0, or a .hdf5 file"
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes.txt").write_text("hello")
    (tmp_path / "a.hdf5").mkdir()
    for name, message in (
        ("empty", f"empty is not a dataset: it has no manifest.json; {allowed}"),
        ("notes.txt", f"notes.txt is not a dataset; {allowed}"),
        ("a.hdf5", "is not a dataset: it has no manifest.json"),
        ("nowhere/at/all", rf"unknown dataset '.*nowhere/at/all' \({allowed}"),
        ("nothing.hdf5", "unknown dataset"),
    ):
        for call in (lambda path: offline.open(path), lambda path: offline.convert(path, tmp_path / "to")):
            with pytest.raises(UserError, match=message):
                call(tmp_path / name)
    assert not (tmp_path / "to").exists()


def test_similar_names_are_suggested(tmp_path: Path) -> None:
    record_dataset(tmp_path / "pendulum-expert")
    (tmp_path / "pendulum-exports").mkdir()
    with pytest.raises(UserError, match=r"did you mean '[^']*/pendulum-expert'\? \(allowed are"):
        offline.open(tmp_path / "pendulum-exprt")


def test_minari_on_old_python_names_the_required_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "minari.storage.local", None)  # as if it were not installed
    with pytest.raises(UserError, match="minari:a/b-v0 needs the extra 'offline': pip install"):
        offline.open("minari:a/b-v0")
    monkeypatch.setattr(sys, "version_info", (3, 10, 13))
    with pytest.raises(UserError, match=r"needs Minari, which needs Python 3\.11 or newer"):
        offline.open("minari:a/b-v0")
