"""Push and pull through `huggingface_hub`, against a stand-in of the Hub's HTTP API on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import Command
from hub_standin import Hub

import zhixing as zx
from zhixing.errors import UserError
from zhixing.utils import importing

huggingface_hub = pytest.importorskip("huggingface_hub")
SHORT: dict[str, Any] = {
    "env_steps": 256, "rollout_steps": 32, "num_envs": 4, "minibatch_size": 64, "eval_every": 0, "eval_episodes": 1,
    "tensorboard": False, "vector__backend": "serial", "quiet": True,
}  # fmt: skip


def test_pushed_agent_is_pulled_and_acts_like_its_run(hub: Hub, tmp_path: Path, run_cli: Command) -> None:
    zx.train("ppo", "CartPole-v1", out="run", seed=3, lr=0.002, eval_video=True, **SHORT)
    code, out, err = run_cli("push", "run", "someone/cartpole-ppo", "--episodes", "3", "--private")
    assert (code, err) == (0, "")
    assert out.startswith(f"{hub.url}/someone/cartpole-ppo/commit/")
    assert hub.private == {"someone/cartpole-ppo": True}
    files = hub.repos["someone/cartpole-ppo"]
    assert files["replay.mp4"] == Path("run/videos/000000000256.mp4").read_bytes()

    code, out, err = run_cli("pull", "someone/cartpole-ppo")
    assert (code, out, err) == (0, "cartpole-ppo\n", "")
    names = ["README.md", "agent.json", "agent.safetensors", "config.yaml", "replay.mp4", "spaces.json"]
    assert sorted(path.name for path in Path("cartpole-ppo").iterdir()) == names
    weights, pulled = zx.load("run").policy.state_dict(), zx.load("cartpole-ppo").policy.state_dict()
    assert all(weights[name].equal(pulled[name]) for name in weights)
    assert run_cli("eval", "cartpole-ppo", "--episodes", "2")[0] == 0
    assert "already contains a run" in run_cli("pull", "someone/cartpole-ppo")[2]


def test_model_card_has_results_and_the_command(hub: Hub, tmp_path: Path) -> None:
    zx.train("ppo", "CartPole-v1", out="run", seed=3, lr=0.002, **SHORT)
    zx.push("run", "someone/pole", episodes=3, seed=5)
    text = hub.repos["someone/pole"]["README.md"].decode()
    results = zx.evaluate("run", 3, 5).summary()
    header = yaml.safe_load(text.split("---\n")[1])
    assert header["library_name"] == "zhixing"
    assert {"reinforcement-learning", "ppo", "CartPole-v1"} <= set(header["tags"])
    (result,) = header["model-index"][0]["results"]
    value = f"{results['mean_return']:.2f} +/- {results['std_return']:.2f}"
    assert [(metric["type"], metric["value"]) for metric in result["metrics"]] == [("mean_reward", value)]
    assert "Results of 3 episodes with seed 5:" in text
    assert f"| mean return | {round(results['mean_return'], 4):g} |" in text
    assert "zhixing train ppo --env CartPole-v1 --seed 3" in text
    assert "lr=0.002" in text
    assert yaml.safe_load(text.split("```yaml\n")[1].split("```")[0])["lr"] == 0.002
    card = huggingface_hub.ModelCard(text)  # the Hub's own reader
    assert card.data.eval_results[0].metric_type == "mean_reward"
    assert "replay.mp4" not in hub.repos["someone/pole"]


def test_pulled_repository_is_read_like_a_strangers_folder(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_cli: Command
) -> None:
    """Only the known files are downloaded, and code that they name isn't imported."""
    zx.train("ppo", "CartPole-v1", out="run", **SHORT)
    zx.push("run", "evil/pole", episodes=1)
    files = hub.repos["evil/pole"]
    settings = yaml.safe_load(files["config.yaml"])
    files["config.yaml"] = yaml.safe_dump({**settings, "net": {**settings["net"], "kind": "evil:Net"}}).encode()
    files["evil.py"] = b"open('imported', 'w')\n"
    files["signature"] = b"0" * 64
    files["sub/agent.json"] = b"{}"
    hub.downloads.clear()
    monkeypatch.setattr(importing, "approved", set())
    assert run_cli("pull", "evil/pole")[0] == 0
    assert set(hub.downloads) == {"README.md", "agent.json", "agent.safetensors", "config.yaml", "spaces.json"}
    for command in ("eval", "export -o out"):
        name, *options = command.split()
        code, _, err = run_cli(name, "pole", *options)
        assert code == 2
        assert "evil:Net" in err
    with pytest.raises(UserError, match="add --trust"):
        zx.load("pole")
    assert not Path("imported").exists()


def test_repository_without_an_agent_is_rejected(hub: Hub) -> None:
    hub.repos["someone/other"] = {"README.md": b"", "model.bin": b"123"}
    with pytest.raises(UserError, match="someone/other contains no agent of zhixing"):
        zx.pull("someone/other")
    assert not Path("other").exists()


def test_errors_of_the_hub_are_explained(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"the Hub rejects the request for someone/none \(404: .*check the name"):
        zx.pull("someone/none")
    monkeypatch.setenv("HF_TOKEN", "wrong")
    with pytest.raises(UserError, match=r"\(401: .*log in with `hf auth login`"):
        zx.push("cartpole", "someone/pole", episodes=1)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # nothing listens there
    for call in (lambda: zx.push("cartpole", "someone/pole", episodes=1), lambda: zx.pull("someone/pole")):
        with pytest.raises(UserError, match="the Hub can't be reached for someone/pole"):
            call()


@pytest.mark.parametrize("name", ["pole", "a/b/c", "../up", "some one/pole", ""])
def test_invalid_names_are_rejected(name: str, hub: Hub) -> None:
    for call in (lambda: zx.pull(name), lambda: zx.push("cartpole", name)):
        with pytest.raises(UserError, match="is not the name of a repository"):
            call()


def test_video_of_the_model_card_must_be_an_mp4(hub: Hub) -> None:
    Path("clip.gif").touch()
    for video in ("clip.gif", "missing.mp4"):
        with pytest.raises(UserError, match=r"must be an existing \.mp4 file"):
            zx.push("cartpole", "someone/pole", video=video)
