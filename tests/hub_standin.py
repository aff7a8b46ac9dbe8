"""A stand-in of the Hugging Face Hub's HTTP API on this machine, for `huggingface_hub`."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOKEN = "hf_standin"


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


@contextmanager
def serve() -> Iterator[Hub]:
    server = Hub()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
