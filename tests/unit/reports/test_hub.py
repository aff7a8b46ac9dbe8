"""Push and pull through `huggingface_hub`, against a stand-in of the Hub's HTTP API on this machine."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import Command

import zhixing as zx
from zhixing.errors import UserError
from zhixing.utils import importing

huggingface_hub = pytest.importorskip("huggingface_hub")
constants = pytest.importorskip("huggingface_hub.constants")
TOKEN = "hf_standin"
SHORT: dict[str, Any] = {
    "env_steps": 256, "rollout_steps": 32, "num_envs": 4, "minibatch_size": 64, "eval_every": 0, "eval_episodes": 1,
    "tensorboard": False, "vector__backend": "serial", "quiet": True,
}  # fmt: skip


class Hub(ThreadingHTTPServer):
    """Repositories in memory. Safetensors are uploaded by Git LFS, everything else in the commit."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.repos: dict[str, dict[str, bytes]] = {}
        self.private: dict[str, bool] = {}
        self.objects: dict[str, bytes] = {}  # LFS, by SHA-256
        self.downloads: list[str] = []

    def commit(self, repo: str) -> str:
        text = repr(sorted((name, hashlib.sha256(data).hexdigest()) for name, data in self.repos[repo].items()))
        return hashlib.sha1(text.encode()).hexdigest()


class Handler(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: Any) -> None: ...

    def answer(self, body: Any = None, status: int = 200, **headers: str) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def missing(self) -> None:
        self.answer({"error": "Repository not found"}, 404, X_Error_Code="RepoNotFound", X_Error_Message="not found")

    def do_POST(self) -> None:
        hub, path, body = self.server, self.path, self.body()
        if path == "/api/validate-yaml":
            self.answer({"errors": [], "warnings": []})
        elif self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self.answer({"error": "Invalid username or password."}, 401)
        elif path == "/api/repos/create":
            wanted = json.loads(body)
            repo = f"{wanted['organization']}/{wanted['name']}"
            exists = repo in hub.repos
            hub.repos.setdefault(repo, {".gitattributes": b""})
            hub.private.setdefault(repo, wanted.get("visibility") == "private")
            self.answer({"url": f"{hub.url}/{repo}", "id": repo}, 409 if exists else 200)
        elif match := re.fullmatch(r"/api/models/(.+)/preupload/main", path):
            files = json.loads(body)["files"]
            modes = {file["path"]: "lfs" if file["path"].endswith(".safetensors") else "regular" for file in files}
            self.answer({"files": [{"path": p, "uploadMode": m, "shouldIgnore": False} for p, m in modes.items()]})
        elif match := re.fullmatch(r"/(.+)\.git/info/lfs/objects/batch", path):
            objects = [
                {**item, "actions": {"upload": {"href": f"{hub.url}/lfs/{item['oid']}"}}}
                for item in json.loads(body)["objects"]
            ]
            self.answer({"transfer": "basic", "objects": objects})
        elif match := re.fullmatch(r"/api/models/(.+)/commit/main", path):
            for line in body.splitlines():
                operation = json.loads(line)
                value = operation["value"]
                if operation["key"] == "file":
                    hub.repos[match[1]][value["path"]] = base64.b64decode(value["content"])
                elif operation["key"] == "lfsFile":
                    hub.repos[match[1]][value["path"]] = hub.objects[value["oid"]]
            oid = hub.commit(match[1])
            self.answer({"commitUrl": f"{hub.url}/{match[1]}/commit/{oid}", "commitOid": oid})
        else:
            self.missing()

    def do_PUT(self) -> None:
        data = self.body()
        assert self.path == f"/lfs/{hashlib.sha256(data).hexdigest()}"
        self.server.objects[self.path[5:]] = data
        self.answer({})

    def do_GET(self) -> None:
        hub = self.server
        match = re.fullmatch(r"/api/models/([^/]+/[^/]+)(/revision/[^/]+)?", self.path.partition("?")[0])
        if match and match[1] in hub.repos:
            siblings = [{"rfilename": name} for name in hub.repos[match[1]]]
            self.answer({"id": match[1], "sha": hub.commit(match[1]), "siblings": siblings})
            return
        match = re.fullmatch(r"/api/models/([^/]+/[^/]+)/tree/[^/]+", self.path.partition("?")[0])
        if match and match[1] in hub.repos:
            files = hub.repos[match[1]].items()
            self.answer(
                [{"type": "file", "path": n, "size": len(d), "oid": hashlib.sha1(d).hexdigest()} for n, d in files]
            )
            return
        match = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", self.path)
        if match and match[3] in hub.repos.get(match[1], {}):
            data = hub.repos[match[1]][match[3]]
            if self.command == "GET":
                hub.downloads.append(match[3])
            etag = f'"{hashlib.sha1(data).hexdigest()}"'
            self.answer(data, ETag=etag, X_Repo_Commit=hub.commit(match[1]))
            return
        self.missing()

    def do_HEAD(self) -> None:
        self.do_GET()


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    server = Hub()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)  # the stand-in has LFS only
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_PROGRESS_BARS", True)
    monkeypatch.setenv("ZHIXING_TRUST", "0")
    yield server
    server.shutdown()
    server.server_close()


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
