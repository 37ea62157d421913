"""A Hugging Face hub on the loopback interface, as far as models are pushed to and read from it."""

import base64
import hashlib
import json
import re
from urllib.parse import unquote

from fake_server import FakeServer, Request

TOKEN = "hf_" + "x" * 34


class FakeModelHub(FakeServer):
    """Repositories by name, each a dictionary of files; `endpoint` is the hub's address."""

    def __init__(self) -> None:
        self.repos: dict[str, dict[str, bytes]] = {}
        self.private: dict[str, bool] = {}
        self.messages: list[str] = []  # of commits
        super().__init__()

    def environment(self) -> dict[str, str]:
        """What a process needs to take this for the hub."""
        return {"HF_ENDPOINT": self.endpoint, "HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0"}

    def answer(self, request: Request) -> None:
        path = unquote(request.path.partition("?")[0])
        writes = request.command == "POST"
        if writes and request.headers.get("Authorization") != f"Bearer {TOKEN}":
            request.send_json({"error": "Invalid username or password."}, 401)
        elif path == "/api/repos/create":
            self._create(request)
        elif path == "/api/validate-yaml":
            request.send_json({"errors": [], "warnings": []})
        elif match := re.fullmatch(r"/api/models/(.+)/preupload/main", path):
            files = json.loads(request.body)["files"]
            plain = {"uploadMode": "regular", "shouldIgnore": False}
            request.send_json({"files": [{"path": f["path"], **plain} for f in files]})
        elif match := re.fullmatch(r"/api/models/(.+)/commit/main", path):
            self._commit(request, match[1])
        elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+)(/revision/.+)?", path):
            self._info(request, match[1])
        elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/tree/.+", path):
            files = self.repos[match[1]].items()
            rows = [{"type": "file", "path": n, "size": len(c), "oid": "0"} for n, c in files]
            request.send_json(rows)
        elif match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/[^/]+/(.+)", path):
            self._file(request, match[1], match[2])
        else:
            request.send_json({"error": f"not found: {path}"}, 404)

    def _create(self, request: Request) -> None:
        body = json.loads(request.body)
        name = f"{body.get('organization') or 'me'}/{body['name']}"
        self.repos.setdefault(name, {})
        self.private[name] = body.get("private") or body.get("visibility") == "private"
        request.send_json({"url": f"{self.endpoint}/{name}", "name": name, "id": name})

    def _commit(self, request: Request, repo: str) -> None:
        for line in request.body.splitlines():
            entry = json.loads(line)
            if entry["key"] == "header":
                self.messages.append(entry["value"]["summary"])
            elif entry["key"] == "file":
                content = base64.b64decode(entry["value"]["content"])
                self.repos[repo][entry["value"]["path"]] = content
        url = f"{self.endpoint}/{repo}/commit/{self._sha(repo)}"
        request.send_json({"success": True, "commitUrl": url, "commitOid": self._sha(repo)})

    def _info(self, request: Request, repo: str) -> None:
        if repo not in self.repos:
            headers = {"X-Error-Code": "RepoNotFound"}
            request.send_json({"error": "Repository not found"}, 404, headers)
            return
        siblings = [{"rfilename": name} for name in self.repos[repo]]
        request.send_json({"id": repo, "sha": self._sha(repo), "siblings": siblings, "tags": []})

    def _file(self, request: Request, repo: str, name: str) -> None:
        content = self.repos.get(repo, {}).get(name)
        if content is None:
            request.send_json({"error": "no entry"}, 404, {"X-Error-Code": "EntryNotFound"})
            return
        etag = hashlib.sha1(content).hexdigest()
        request.send(content, headers={"ETag": f'"{etag}"', "X-Repo-Commit": self._sha(repo)})

    def _sha(self, repo: str) -> str:
        return hashlib.sha1(repr(sorted(self.repos[repo].items())).encode()).hexdigest()
