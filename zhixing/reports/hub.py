"""Push agents to the Hugging Face Hub and pull them: `zhixing push RUN REPO`, `zhixing pull REPO`."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from zhixing.errors import UserError
from zhixing.reports.model_card import VIDEO, model_card
from zhixing.training.run_folder import RunFolder
from zhixing.training.zoo import export
from zhixing.utils.extras import require_extra

# an exported agent, its model card and its video; nothing else of a repository is downloaded
FILES = ("config.yaml", "spaces.json", "agent.json", "agent.safetensors", "README.md", VIDEO)


def push(
    run: str | Path,
    repo: str,
    *,
    episodes: int = 100,
    seed: int = 0,
    checkpoint: str | int = "last",
    video: str | Path | None = None,
    private: bool = False,
) -> str:
    """Export a run's agent and upload it with a model card. Return the URL of the commit.

    Args:
        run: Run folder, or the name of an agent in `zhixing zoo`.
        repo: Repository at the Hub, as USER/NAME. It is created if it doesn't exist.
        episodes: Number of evaluation episodes for the returns in the model card.
        seed: Seed of these episodes.
        checkpoint: `last`, `best` or the step of a checkpoint.
        video: An .mp4 file for the model card; by default the newest video in the run folder, if there is one.
        private: Make a new repository private.
    """
    api = _api(repo)
    file = _newest_video(run) if video is None else Path(video)
    if file is not None and not (file.is_file() and file.suffix == ".mp4"):
        raise UserError(
            f"the video {file} must be an existing .mp4 file; record one with `zhixing video RUN -o run.mp4`"
        )
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / repo.rpartition("/")[2]
        card = export(run, folder, episodes=episodes, seed=seed, checkpoint=checkpoint)
        if file is not None:
            shutil.copyfile(file, folder / VIDEO)
        (folder / "README.md").write_text(model_card(folder, card, repo), encoding="utf-8")
        with _explained(repo):
            api.create_repo(repo, private=private, exist_ok=True)
            names = [name for name in FILES if (folder / name).is_file()]
            commit = api.upload_folder(
                repo_id=repo, folder_path=folder, allow_patterns=names, commit_message=f"Push {folder.name}"
            )
    return str(commit.commit_url)


def pull(repo: str, out: str | Path | None = None, *, revision: str | None = None) -> Path:
    """Download an agent to a new folder, by default named like the repository, and return its path.

    Commands and `zx.load` take the folder as a run. Nothing in it is executed, and code that it names is imported only
    with `--trust`, as in any run folder from someone else.
    """
    api = _api(repo)
    target = RunFolder(Path(repo.rpartition("/")[2]) if out is None else Path(out))
    target.check_free()
    with tempfile.TemporaryDirectory() as temporary:
        with _explained(repo):
            api.snapshot_download(repo, revision=revision, local_dir=temporary, allow_patterns=list(FILES))
        source = RunFolder.open(temporary) if Path(temporary, "config.yaml").is_file() else None
        if source is None or not source.agent_file.is_file():
            raise UserError(
                f"{repo} contains no agent of zhixing (config.yaml and agent.safetensors); pull a repository that "
                f"`zhixing push` made"
            )
        target.path.mkdir(parents=True, exist_ok=True)
        for name in FILES:
            if (source.path / name).is_file():
                shutil.copyfile(source.path / name, target.path / name)
    return target.given


def _api(repo: str) -> Any:
    """Return a client of the Hub, at the address HF_ENDPOINT. Raise `UserError` for an invalid name."""
    with require_extra("the Hugging Face Hub", "hub"):
        import huggingface_hub
        from huggingface_hub.errors import HFValidationError
        from huggingface_hub.utils import validate_repo_id
    try:
        validate_repo_id(repo)
        if repo.count("/") != 1:
            raise HFValidationError("the user is missing")
    except HFValidationError as error:
        raise UserError(f"{repo!r} is not the name of a repository: {error}; write USER/NAME") from None
    return huggingface_hub.HfApi(os.environ.get("HF_ENDPOINT"), library_name="zhixing")


def _newest_video(run: str | Path) -> Path | None:
    videos = sorted((RunFolder.open(run).path / "videos").glob("*.mp4"))
    return videos[-1] if videos else None


ADVICE = {
    401: "log in with `hf auth login`, or set HF_TOKEN",
    403: "use a token that may write to this repository",
    404: "check the name, or log in with `hf auth login` if it is private",
}


@contextmanager
def _explained(repo: str) -> Iterator[None]:
    """Turn errors of the Hub and of the network into `UserError`."""
    try:
        yield
    except Exception as error:  # of `huggingface_hub` or its HTTP library
        status = getattr(getattr(error, "response", None), "status_code", None)
        text = getattr(error, "server_message", None) or str(error)
        reason = text.strip().split("\n")[0][:300] or type(error).__name__
        if isinstance(status, int):
            advice = ADVICE.get(status, "try again later")
            raise UserError(f"the Hub rejects the request for {repo} ({status}: {reason}); {advice}") from error
        raise UserError(f"the Hub can't be reached for {repo}: {reason}; check the network and try again") from error
