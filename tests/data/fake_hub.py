"""A Hugging Face hub on the loopback interface, as far as streaming a dataset needs one.

It serves one dataset of a few Parquet shards and can be told to be rude: `FakeHub.troubles` lists
what the next requests for file content get instead of an answer.
"""

import io
import json
import re
from urllib.parse import parse_qs, unquote

import pyarrow as pa
import pyarrow.parquet as pq
from fake_server import FakeServer, Request

REPO = "org/corpus"
REVISION = "9" * 40
CARD = b"""---
configs:
- config_name: sample
  data_files:
  - split: train
    path: sample/*
---
"""


def parquet_bytes(texts: list[str]) -> bytes:
    """A Parquet file with a column ``text``."""
    buffer = io.BytesIO()
    pq.write_table(pa.table({"text": texts}), buffer, row_group_size=4)
    return buffer.getvalue()


class FakeHub(FakeServer):
    """Serves ``shards`` (lists of documents) while it is entered; `endpoint` is its address."""

    def __init__(self, shards: list[list[str]]) -> None:
        self.files = {f"sample/{i:03d}.parquet": parquet_bytes(s) for i, s in enumerate(shards)}
        self.files["README.md"] = CARD
        self.troubles: list[str] = []  # "429", "500", "cut": taken from the front
        self.log: list[str] = []
        self.requests: list[str] = []  # method and path of all, lists of files among them
        super().__init__()

    def answer(self, request: Request) -> None:
        self.requests.append(f"{request.command} {request.path}")
        path, _, query = request.path.partition("?")
        path = unquote(path)
        if path.startswith(f"/api/datasets/{REPO}/revision/"):
            siblings = [{"rfilename": name} for name in self.files]
            request.send_json({"id": REPO, "sha": REVISION, "siblings": siblings, "tags": []})
        elif "/paths-info/" in path:
            request.send_json(self._paths_info(request.body))
        elif match := re.match(rf"/api/datasets/{REPO}/tree/[^/]+/?(.*)", path):
            request.send_json(self._tree(match[1], recursive="recursive=true" in query.lower()))
        elif match := re.match(rf"/datasets/{REPO}/resolve/[^/]+/(.*)", path):
            self._content(request, match[1])
        else:
            request.send_json({"error": "not found"}, status=404)

    def _paths_info(self, body: bytes) -> list[dict[str, object]]:
        try:
            paths = json.loads(body)["paths"]
        except ValueError:
            paths = parse_qs(body.decode()).get("paths", [])
        return [entry for entry in self._entries() if entry["path"] in paths]

    def _tree(self, folder: str, recursive: bool) -> list[dict[str, object]]:
        prefix = f"{folder.rstrip('/')}/" if folder else ""
        below = [e for e in self._entries() if str(e["path"]).startswith(prefix)]
        return [e for e in below if recursive or "/" not in str(e["path"])[len(prefix) :]]

    def _entries(self) -> list[dict[str, object]]:
        folder = {"type": "directory", "path": "sample", "oid": "0" * 40}
        files = (
            {"type": "file", "path": name, "size": len(data), "oid": "0" * 40}
            for name, data in self.files.items()
        )
        return [folder, *files]

    def _content(self, request: Request, name: str) -> None:
        is_sample = name.startswith("sample/") and request.command == "GET"
        trouble = self.troubles.pop(0) if self.troubles and is_sample else ""
        self.log.append(trouble or name)
        if trouble == "cut":
            request.hang_up()
        elif trouble:
            request.send_json({"error": trouble}, status=int(trouble), headers={"Retry-After": "1"})
        elif name not in self.files:
            headers = {"X-Error-Code": "EntryNotFound"}
            request.send_json({"error": "no entry"}, status=404, headers=headers)
        else:
            headers = {"ETag": f'"{"0" * 40}"', "X-Repo-Commit": REVISION}
            request.send_range(self.files[name], headers)
