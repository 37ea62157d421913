"""A Hugging Face hub on the loopback interface, as far as models are pushed to and read from it."""

from __future__ import annotations

import base64
import hashlib
import http.server
import json
import re
import threading
from urllib.parse import unquote

TOKEN = "hf_" + "x" * 34


class FakeModelHub:
    """Repositories by name, each a dictionary of files; `endpoint` is the hub's address."""

    def __init__(self) -> None:
        self.repos: dict[str, dict[str, bytes]] = {}
        self.private: dict[str, bool] = {}
        self.messages: list[str] = []  # of commits
        hub = self

        class Handler(_Handler):
            def answer(self) -> None:
                hub.answer(self)

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> FakeModelHub:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._server.shutdown()

    def environment(self) -> dict[str, str]:
        """What a process needs to take this for the hub."""
        return {"HF_ENDPOINT": self.endpoint, "HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0"}

    def answer(self, request: _Handler) -> None:
        path = unquote(request.path.partition("?")[0])
        writes = request.command == "POST"
        if writes and request.headers.get("Authorization") != f"Bearer {TOKEN}":
            request.send_json({"error": "Invalid username or password."}, 401)
        elif path == "/api/repos/create":
            self._create(request)
        elif path == "/api/validate-yaml":
            request.send_json({"errors": [], "warnings": []})
        elif found := re.fullmatch(r"/api/models/(.+)/preupload/main", path):
            files = json.loads(request.body)["files"]
            plain = {"uploadMode": "regular", "shouldIgnore": False}
            request.send_json({"files": [{"path": f["path"], **plain} for f in files]})
        elif found := re.fullmatch(r"/api/models/(.+)/commit/main", path):
            self._commit(request, found[1])
        elif found := re.fullmatch(r"/api/models/([^/]+/[^/]+)(/revision/.+)?", path):
            self._info(request, found[1])
        elif found := re.fullmatch(r"/api/models/([^/]+/[^/]+)/tree/.+", path):
            files = self.repos[found[1]].items()
            rows = [{"type": "file", "path": n, "size": len(c), "oid": "0"} for n, c in files]
            request.send_json(rows)
        elif found := re.fullmatch(r"/([^/]+/[^/]+)/resolve/[^/]+/(.+)", path):
            self._file(request, found[1], found[2])
        else:
            request.send_json({"error": f"not found: {path}"}, 404)

    def _create(self, request: _Handler) -> None:
        asked = json.loads(request.body)
        name = f"{asked.get('organization') or 'me'}/{asked['name']}"
        self.repos.setdefault(name, {})
        self.private[name] = asked.get("private") or asked.get("visibility") == "private"
        request.send_json({"url": f"{self.endpoint}/{name}", "name": name, "id": name})

    def _commit(self, request: _Handler, repo: str) -> None:
        for line in request.body.splitlines():
            entry = json.loads(line)
            if entry["key"] == "header":
                self.messages.append(entry["value"]["summary"])
            elif entry["key"] == "file":
                content = base64.b64decode(entry["value"]["content"])
                self.repos[repo][entry["value"]["path"]] = content
        url = f"{self.endpoint}/{repo}/commit/{self._sha(repo)}"
        request.send_json({"success": True, "commitUrl": url, "commitOid": self._sha(repo)})

    def _info(self, request: _Handler, repo: str) -> None:
        if repo not in self.repos:
            headers = {"X-Error-Code": "RepoNotFound"}
            request.send_json({"error": "Repository not found"}, 404, headers)
            return
        siblings = [{"rfilename": name} for name in self.repos[repo]]
        request.send_json({"id": repo, "sha": self._sha(repo), "siblings": siblings, "tags": []})

    def _file(self, request: _Handler, repo: str, name: str) -> None:
        content = self.repos.get(repo, {}).get(name)
        if content is None:
            request.send_json({"error": "no entry"}, 404, {"X-Error-Code": "EntryNotFound"})
            return
        etag = hashlib.sha1(content).hexdigest()
        request.send(content, headers={"ETag": f'"{etag}"', "X-Repo-Commit": self._sha(repo)})

    def _sha(self, repo: str) -> str:
        return hashlib.sha1(repr(sorted(self.repos[repo].items())).encode()).hexdigest()


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    body = b""

    def log_message(self, *arguments: object) -> None:
        """Quiet."""

    def answer(self) -> None:
        raise NotImplementedError

    def _serve(self) -> None:
        self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.answer()

    do_GET = do_HEAD = do_POST = _serve

    def send_json(self, content: object, status: int = 200, headers: dict[str, str] | None = None):
        self.send(json.dumps(content).encode(), status, headers)

    def send(self, data: bytes, status: int = 200, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {**(headers or {}), "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)
