"""Minari's datasets, which live in its own folder under names such as `D4RL/pen/human-v2`. Never goes to the network.

Only its storage is used: what a set says of its environment is read as text, never made.
"""

from __future__ import annotations

import copy
import json
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.envs.registration import EnvSpec, registry

from zhixing import __version__
from zhixing.core.spaces import Spaces
from zhixing.core.tree import Tree, tree_map
from zhixing.errors import UserError, unknown
from zhixing.offline.actions import to_task
from zhixing.offline.dataset import Dataset
from zhixing.offline.recording import Array, Chunk, Header, cast, from_extra, plain

PREFIX = "minari:"
OURS = "zhixing"  # where the metadata of our own sets tells the task, also one that Gymnasium doesn't know


def read(source: str | Path) -> Dataset:
    """All of a set, in memory: `minari:NAMESPACE/NAME-v0`, or the folder of one."""
    return Dataset.gather(*recording(source))


def recording(source: str | Path) -> tuple[Header, Iterator[Chunk]]:
    """A set's header, and its episodes one by one."""
    who = str(source)
    from_extra("h5py", who)
    storage_module = from_extra("minari.dataset.minari_storage", who)
    folder = _named(who) if who.startswith(PREFIX) else data_folder(Path(source))
    if folder is None:
        raise UserError(f"{who} is no folder of a Minari dataset: it holds no metadata.json")
    try:
        metadata = storage_module.MinariStorage.read_raw_metadata(folder)
        if not isinstance(metadata, dict):
            raise ValueError("its metadata.json isn't what Minari writes")
        if not {"observation_space", "action_space"} <= set(metadata):
            # Minari would make the environment that the file names: that runs code
            raise UserError(f"{who} tells no spaces: it was written by an old version of Minari; download a newer one")
        storage = storage_module.MinariStorage.read(folder)
        num_episodes = int(storage.total_episodes)
    except ImportError as error:
        raise UserError(f"{who} is stored as {metadata.get('data_format')}: {error}") from None
    except (OSError, ValueError, KeyError, TypeError, AssertionError, NotImplementedError, RecursionError) as error:
        raise _damaged(who, error) from None
    spaces = Spaces(storage.observation_space, storage.action_space)
    header = Header(spaces=spaces, **_told(metadata), name=who)
    return header, _chunks(header, storage, num_episodes)


def data_folder(folder: Path) -> Path | None:
    """Where the files of a Minari dataset are, below its folder or in it; None if it is none."""
    for place in (folder / "data", folder):
        if (place / "metadata.json").is_file():
            return place
    return None


def _named(who: str) -> Path:
    name = who.removeprefix(PREFIX)
    minari = from_extra("minari.storage.local", who)
    try:
        minari.parse_dataset_id(name)  # refuses paths that lead elsewhere
    except (ValueError, TypeError):
        raise UserError(f"{who} is no name of a Minari dataset; they look like minari:NAMESPACE/NAME-v0") from None
    folder = minari.get_dataset_path(name) / "data"
    if not (folder / "metadata.json").is_file():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            there = list(minari.list_local_datasets())
        raise unknown("Minari dataset", name, there, f"(nothing is downloaded here: `minari download {name}` does it)")
    return Path(folder)


def _told(metadata: dict[str, Any]) -> dict[str, Any]:
    """Task, references and note, as far as they are plain and make sense."""
    told: dict[str, Any] = {"note": str(metadata.get("description") or "")}
    scores = {"random": metadata.get("ref_min_score"), "expert": metadata.get("ref_max_score")}
    if all(isinstance(score, (int, float)) and abs(score) < 1e300 for score in scores.values()):
        told["references"] = scores
    ours = metadata.get(OURS)
    if isinstance(ours, dict) and isinstance(ours.get("env"), str) and isinstance(ours.get("options"), dict):
        return told | {"env": ours["env"], "options": ours["options"]}
    try:
        spec = json.loads(metadata["env_spec"])
        env, options, limit = spec["id"], dict(spec.get("kwargs") or {}), spec.get("max_episode_steps")
    except (KeyError, TypeError, ValueError):
        return told
    if not isinstance(env, str):
        return told
    options.pop("render_mode", None)
    usual = registry[env].max_episode_steps if env in registry else limit
    if type(limit) is int and limit != usual:
        options["max_episode_steps"] = limit
    return told | {"env": env, "options": options}


def _chunks(header: Header, storage: Any, num_episodes: int) -> Iterator[Chunk]:
    who, spec = header.name, header.spaces.fields()
    episodes = iter(storage.get_episodes(range(num_episodes)))
    for i in range(num_episodes):
        try:
            episode = next(episodes)
            num = len(episode["rewards"])
        except (StopIteration, OSError, ValueError, KeyError, TypeError, AssertionError) as error:
            raise _damaged(who, f"episode {i}: {error}") from None
        if num == 0:
            continue
        at = f"{who}, episode {i}"
        seen = cast(at, "obs", spec["obs"], episode["observations"], num + 1)
        rows = {
            "obs": tree_map(lambda leaf: leaf[:-1], seen),
            "action": cast(at, "action", spec["action"], episode["actions"], num),
            "reward": cast(at, "reward", spec["reward"], episode["rewards"], num),
            "terminated": cast(at, "terminated", spec["terminated"], episode["terminations"], num),
            "truncated": cast(at, "truncated", spec["truncated"], episode["truncations"], num),
        }
        yield Chunk(rows, np.array([num - 1]), {"obs": tree_map(lambda leaf: leaf[-1:], seen)})


def _damaged(who: str, error: object) -> UserError:
    reason = str(error).split("\n")[0] or type(error).__name__
    return UserError(f"{who} is damaged or no Minari dataset: {reason}")


# ---------------------------------------------------------------------- writing


def write(dataset: Dataset, dataset_id: str) -> None:
    """Write a set that Minari itself reads, under a new name, without loss: pictures aren't turned into JPEG."""
    name = dataset_id.removeprefix(PREFIX)
    spaces = dataset.spaces
    if spaces.num_agents > 1 or spaces.extras():
        extras = ", ".join(spaces.extras()) or "agents"
        raise UserError(f"Minari has no place for the {extras} of {dataset.name}; keep it in zhixing's own format")
    from_extra("h5py", f"{PREFIX}{name}")
    minari = from_extra("minari.utils", f"{PREFIX}{name}")
    try:
        namespace = minari.parse_dataset_id(name)[0]
    except (ValueError, TypeError):
        raise UserError(f"{name!r} is no name for a Minari dataset; they look like NAMESPACE/NAME-v0") from None
    folder = minari.get_dataset_path(name)
    if folder.exists():
        raise UserError(f"there is a Minari dataset {name} already; choose another name or version")
    if namespace is not None and namespace not in minari.list_local_namespaces():
        minari.create_namespace(namespace)
    try:
        _write(minari, dataset, name, folder / "data")
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _write(minari: Any, dataset: Dataset, name: str, folder: Path) -> None:
    folder.mkdir(parents=True)
    storage = minari.MinariStorage.new(
        folder,
        observation_space=dataset.spaces.obs,
        action_space=dataset.spaces.action,
        env_spec=_spec(dataset),
        data_format="hdf5",
        jpeg_encoding=False,
    )
    metadata: dict[str, Any] = {"dataset_id": name, "minari_version": minari.__version__, "description": dataset.note}
    metadata[OURS] = {"env": dataset.env, "options": dataset.options, "version": __version__}
    if set(dataset.references) == {"random", "expert"}:
        metadata |= {"ref_min_score": dataset.references["random"], "ref_max_score": dataset.references["expert"]}
    storage.update_metadata(metadata)
    buffers = (minari.EpisodeBuffer(**_episode(dataset, i)) for i in range(dataset.num_episodes))
    storage.update_episodes(buffers)


def _episode(dataset: Dataset, i: int) -> dict[str, Any]:
    batch = dataset.episode(i)

    def whole(obs: Array, last: Array) -> Array:
        return np.concatenate([obs, last[i : i + 1]])

    seen: Tree = tree_map(whole, batch.obs, dataset.lasts["obs"])
    return {
        "observations": seen,
        "actions": to_task(dataset.spaces, batch.action),
        "rewards": batch.reward,
        "terminations": batch.terminated,
        "truncations": batch.truncated,
    }


def _spec(dataset: Dataset) -> EnvSpec | None:
    """With which Minari makes the task again, if it is Gymnasium's."""
    if dataset.env not in registry or not plain(registry[dataset.env].kwargs):
        return None
    spec = copy.deepcopy(gym.spec(dataset.env))
    spec.kwargs.update({key: value for key, value in dataset.options.items() if key != "max_episode_steps"})
    spec.max_episode_steps = dataset.options.get("max_episode_steps", spec.max_episode_steps)
    return None if callable(spec.entry_point) or callable(spec.vector_entry_point) else spec
