"""Minari datasets, which Minari stores under names such as `D4RL/pen/human-v2`. Nothing is downloaded.

Only Minari's storage is used. The environment that a dataset names is read as text and never created.
"""

from __future__ import annotations

import copy
import shutil
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.envs.registration import EnvSpec, registry

from zhixing import __version__
from zhixing.core.spaces import Spaces
from zhixing.core.tree import Tree, tree_map
from zhixing.errors import UserError, unknown
from zhixing.offline.actions import to_env
from zhixing.offline.chunks import Array, Chunk, Header, cast, is_json
from zhixing.offline.dataset import Dataset
from zhixing.utils.extras import require_extra
from zhixing.utils.files import parse_json

PREFIX = "minari:"
METADATA_KEY = "zhixing"  # of the environment in metadata written by zhixing; Gymnasium may not know it


def read_chunks(source: str | Path) -> tuple[Header, Iterator[Chunk]]:
    """Return the header of `minari:NAMESPACE/NAME-v0`, or of the folder of a dataset, and its episodes as chunks."""
    name = str(source)
    with _require_minari(name):
        import h5py  # noqa: F401  # Minari imports it only when it reads or writes
        from minari.dataset.minari_storage import MinariStorage
    folder = _find_folder(name) if name.startswith(PREFIX) else data_folder(Path(source))
    if folder is None:
        raise UserError(f"{name} is not the folder of a Minari dataset: it has no metadata.json")
    try:
        metadata = MinariStorage.read_raw_metadata(folder)
        if not isinstance(metadata, dict):
            raise ValueError("its metadata.json is not what Minari writes")
        if not {"observation_space", "action_space"} <= set(metadata):
            # Minari would create the environment that the file names, which runs code
            raise UserError(
                f"{name} lists no spaces: an old version of Minari wrote it; download a newer version of the dataset"
            )
        storage = MinariStorage.read(folder)
        num_episodes = int(storage.total_episodes)
    except ImportError as error:
        raise UserError(f"{name} is stored as {metadata.get('data_format')}: {error}") from None
    except (OSError, ValueError, KeyError, TypeError, AssertionError, NotImplementedError, RecursionError) as error:
        raise _damaged(name, error) from None
    spaces = Spaces(storage.observation_space, storage.action_space)
    header = Header(spaces=spaces, **_header_fields(metadata), name=name)
    return header, _chunks(header, storage, num_episodes)


def data_folder(folder: Path) -> Path | None:
    """Return the folder with the files of a Minari dataset, `folder` or its subfolder, or None if there are none."""
    for candidate in (folder / "data", folder):
        if (candidate / "metadata.json").is_file():
            return candidate
    return None


@contextmanager
def _require_minari(source: str) -> Iterator[None]:
    """Raise `UserError` if an import in the block fails."""
    if sys.version_info < (3, 11):
        raise UserError(f"{source} needs Minari, which needs Python 3.11 or newer; use a newer Python")
    with require_extra(source, "offline"):
        yield


def _find_folder(source: str) -> Path:
    name = source.removeprefix(PREFIX)
    with _require_minari(source):
        import minari.storage.local as local
    try:
        local.parse_dataset_id(name)  # rejects paths that lead elsewhere
    except (ValueError, TypeError):
        raise UserError(f"{source} is not a Minari dataset; their names look like minari:NAMESPACE/NAME-v0") from None
    folder = local.get_dataset_path(name) / "data"
    if not (folder / "metadata.json").is_file():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            names = list(local.list_local_datasets())
        raise unknown("Minari dataset", name, names, f"(zhixing downloads nothing: run `minari download {name}`)")
    return Path(folder)


def _header_fields(metadata: dict[str, Any]) -> dict[str, Any]:
    """Return environment, references and note from metadata, without those that are missing or invalid."""
    values: dict[str, Any] = {"note": str(metadata.get("description") or "")}
    scores = {"random": metadata.get("ref_min_score"), "expert": metadata.get("ref_max_score")}
    if all(isinstance(score, (int, float)) and abs(score) < 1e300 for score in scores.values()):
        values["references"] = scores
    ours = metadata.get(METADATA_KEY)
    if isinstance(ours, dict) and isinstance(ours.get("env"), str) and isinstance(ours.get("options"), dict):
        return values | {"env": ours["env"], "options": ours["options"]}
    try:
        spec = parse_json(metadata["env_spec"])
        env, options, limit = spec["id"], dict(spec.get("kwargs") or {}), spec.get("max_episode_steps")
    except (KeyError, TypeError, ValueError):
        return values
    if not isinstance(env, str):
        return values
    options.pop("render_mode", None)
    default_limit = registry[env].max_episode_steps if env in registry else limit
    if type(limit) is int and limit != default_limit:
        options["max_episode_steps"] = limit
    return values | {"env": env, "options": options}


def _chunks(header: Header, storage: Any, num_episodes: int) -> Iterator[Chunk]:
    spec = header.spaces.fields()
    episodes = iter(storage.get_episodes(range(num_episodes)))
    for i in range(num_episodes):
        try:
            episode = next(episodes)
            length = len(episode["rewards"])
        except (StopIteration, OSError, ValueError, KeyError, TypeError, AssertionError) as error:
            raise _damaged(header.name, f"episode {i}: {error}") from None
        if length == 0:
            continue
        source = f"{header.name}, episode {i}"
        obs = cast(source, "obs", spec["obs"], episode["observations"], length + 1)
        actions = header.spaces.flatten_action(episode["actions"])
        rows = {
            "obs": tree_map(lambda leaf: leaf[:-1], obs),
            "action": cast(source, "action", spec["action"], actions, length),
            "reward": cast(source, "reward", spec["reward"], episode["rewards"], length),
            "terminated": cast(source, "terminated", spec["terminated"], episode["terminations"], length),
            "truncated": cast(source, "truncated", spec["truncated"], episode["truncations"], length),
        }
        yield Chunk(rows, np.array([length - 1]), {"obs": tree_map(lambda leaf: leaf[-1:], obs)})


def _damaged(source: str, error: object) -> UserError:
    reason = str(error).split("\n")[0] or type(error).__name__
    return UserError(f"{source} is damaged or not a Minari dataset: {reason}")


# --- writing ---


def write(dataset: Dataset, dataset_id: str) -> None:
    """Write a dataset for Minari under a new name, without loss: images aren't compressed as JPEG."""
    name = dataset_id.removeprefix(PREFIX)
    spaces = dataset.spaces
    if spaces.num_agents > 1 or spaces.extras():
        extras = ", ".join(spaces.extras()) or "agents"
        raise UserError(f"Minari can't store the {extras} of {dataset.name}; use zhixing's own format")
    with _require_minari(f"{PREFIX}{name}"):
        import h5py  # noqa: F401
        from minari import utils as minari
    try:
        namespace = minari.parse_dataset_id(name)[0]
    except (ValueError, TypeError):
        raise UserError(
            f"{name!r} is not a valid name for a Minari dataset; names look like NAMESPACE/NAME-v0"
        ) from None
    folder = minari.get_dataset_path(name)
    if folder.exists():
        raise UserError(f"the Minari dataset {name} exists already; choose another name or version")
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
        env_spec=_env_spec(dataset),
        data_format="hdf5",
        jpeg_encoding=False,
    )
    metadata: dict[str, Any] = {"dataset_id": name, "minari_version": minari.__version__, "description": dataset.note}
    metadata[METADATA_KEY] = {"env": dataset.env, "options": dataset.options, "version": __version__}
    if set(dataset.references) == {"random", "expert"}:
        metadata |= {"ref_min_score": dataset.references["random"], "ref_max_score": dataset.references["expert"]}
    storage.update_metadata(metadata)
    episodes = (minari.EpisodeBuffer(**_episode(dataset, i)) for i in range(dataset.num_episodes))
    storage.update_episodes(episodes)


def _episode(dataset: Dataset, i: int) -> dict[str, Any]:
    batch = dataset.episode(i)

    def append_final(obs: Array, final_obs: Array) -> Array:
        return np.concatenate([obs, final_obs[i : i + 1]])

    observations: Tree = tree_map(append_final, batch.obs, dataset.final_fields["obs"])
    return {
        "observations": observations,
        "actions": dataset.spaces.unflatten_action(to_env(dataset.spaces, batch.action)),
        "rewards": batch.reward,
        "terminations": batch.terminated,
        "truncations": batch.truncated,
    }


def _env_spec(dataset: Dataset) -> EnvSpec | None:
    """Return the spec from which Minari can create the environment, if it is registered with Gymnasium."""
    if dataset.env not in registry or not is_json(registry[dataset.env].kwargs):
        return None
    spec = copy.deepcopy(gym.spec(dataset.env))
    spec.kwargs.update({key: value for key, value in dataset.options.items() if key != "max_episode_steps"})
    spec.max_episode_steps = dataset.options.get("max_episode_steps", spec.max_episode_steps)
    return None if callable(spec.entry_point) or callable(spec.vector_entry_point) else spec
