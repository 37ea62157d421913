"""A folder over HTTP on the loopback interface, with ranges of bytes, and faults on request."""

from __future__ import annotations

import http.server
import re
import threading
import time
from pathlib import Path


class RangeServer:
    """Serves ``folder`` while it is entered; `address` is its own.

    ``troubles`` lists what the next requests for content get in place of it: a status, "cut" (half
    of the answer, then the connection is closed), "reset" (no answer) or "slow" (none for long).
    ``always`` is the same for all requests from now on.
    """

    def __init__(self, folder: Path, ranges: bool = True) -> None:
        self.folder, self.ranges = folder, ranges
        self.troubles: list[str] = []
        self.always = ""
        self.served: list[str] = []
        self.ended = threading.Event()
        owner = self

        class Handler(_Handler):
            server_side = owner

        self._server = _QuietServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> RangeServer:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.ended.set()
        self._server.shutdown()


class _QuietServer(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *arguments: object) -> None:
        """A client that went away."""


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_side: RangeServer

    def log_message(self, *arguments: object) -> None:
        """Quiet."""

    def do_GET(self) -> None:
        server = self.server_side
        path = server.folder / self.path.lstrip("/").split("?")[0]
        if path.is_dir():
            names = "".join(f'<a href="{p.name}">{p.name}</a>' for p in sorted(path.iterdir()))
            self._send(200, names.encode(), {"Content-Type": "text/html"})
            return
        if not path.is_file():
            self._send(404, b"", {})
            return
        trouble = server.always
        if not trouble and server.troubles and self.command == "GET":
            trouble = server.troubles.pop(0)
        server.served.append(trouble or path.name)
        if trouble == "slow":
            server.ended.wait(300)
        if trouble in ("reset", "slow"):
            self.close_connection = True
            self.connection.close()
        elif trouble.isdigit():
            self._send(int(trouble), b"", {})
        else:
            self._content(path, cut=trouble == "cut")

    do_HEAD = do_GET

    def _content(self, path: Path, cut: bool) -> None:
        data = path.read_bytes()
        headers = {"Accept-Ranges": "bytes"} if self.server_side.ranges else {}
        stamp = path.stat().st_mtime
        headers |= {"ETag": f'"{len(data)}-{hash(data)}"', "Last-Modified": time.ctime(stamp)}
        byte_range = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
        status = 200
        if byte_range and self.server_side.ranges:
            first, last = int(byte_range[1]), min(int(byte_range[2] or len(data)), len(data) - 1)
            headers["Content-Range"] = f"bytes {first}-{last}/{len(data)}"
            status, data = 206, data[first : last + 1]
        self._send(status, data, headers, cut)

    def _send(self, status: int, data: bytes, headers: dict[str, str], cut: bool = False) -> None:
        self.send_response(status)
        for name, value in (headers | {"Content-Length": str(len(data))}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data[: len(data) // 2] if cut else data)
        if cut:
            self.wfile.flush()
            self.close_connection = True
            self.connection.close()
