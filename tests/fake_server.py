"""An HTTP server on the loopback interface that stands in for one of the internet."""

import http.server
import json
import re
import threading
from typing import Self


class Request(http.server.BaseHTTPRequestHandler):
    """A request: `body` is read; it is answered by one of the ``send`` methods."""

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

    def send(
        self,
        data: bytes,
        status: int = 200,
        headers: dict[str, str] | None = None,
        *,
        cut: bool = False,
    ) -> None:
        """With ``cut`` half of the data, and then the connection is closed."""
        self.send_response(status)
        for name, value in {**(headers or {}), "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data[: len(data) // 2] if cut else data)
        if cut:
            self.hang_up()

    def send_range(self, data: bytes, headers: dict[str, str], *, cut: bool = False) -> None:
        """The range of bytes that was asked for, else all."""
        headers = {**headers, "Accept-Ranges": "bytes"}
        byte_range = re.match(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
        if not byte_range:
            self.send(data, 200, headers, cut=cut)
            return
        first, last = int(byte_range[1]), min(int(byte_range[2] or len(data)), len(data) - 1)
        headers["Content-Range"] = f"bytes {first}-{last}/{len(data)}"
        self.send(data[first : last + 1], 206, headers, cut=cut)

    def hang_up(self) -> None:
        """Closes the connection."""
        self.wfile.flush()
        self.close_connection = True
        self.connection.close()


class _QuietServer(http.server.ThreadingHTTPServer):
    def handle_error(self, *arguments: object) -> None:
        """A client that went away."""


class FakeServer:
    """Answers requests while it is entered; `endpoint` is its address."""

    def __init__(self) -> None:
        server = self

        class Handler(Request):
            def answer(self) -> None:
                server.answer(self)

        self._server = _QuietServer(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._server.shutdown()

    def answer(self, request: Request) -> None:
        """Sends the answer to a request."""
        raise NotImplementedError
