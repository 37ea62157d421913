"""A folder over HTTP on the loopback interface, with ranges of bytes, and faults on request."""

import threading
import time
from pathlib import Path

from fake_server import FakeServer, Request


class RangeServer(FakeServer):
    """Serves ``folder`` while it is entered.

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
        super().__init__()

    def __exit__(self, *exception: object) -> None:
        self.ended.set()
        super().__exit__(*exception)

    def answer(self, request: Request) -> None:
        path = self.folder / request.path.lstrip("/").split("?")[0]
        if path.is_dir():
            names = "".join(f'<a href="{p.name}">{p.name}</a>' for p in sorted(path.iterdir()))
            request.send(names.encode(), headers={"Content-Type": "text/html"})
            return
        if not path.is_file():
            request.send(b"", 404)
            return
        trouble = self.always
        if not trouble and self.troubles and request.command == "GET":
            trouble = self.troubles.pop(0)
        self.served.append(trouble or path.name)
        if trouble == "slow":
            self.ended.wait(300)
        if trouble in ("reset", "slow"):
            request.hang_up()
        elif trouble.isdigit():
            request.send(b"", int(trouble))
        else:
            data, stamp = path.read_bytes(), time.ctime(path.stat().st_mtime)
            headers = {"ETag": f'"{len(data)}-{hash(data)}"', "Last-Modified": stamp}
            send = request.send_range if self.ranges else request.send
            send(data, headers=headers, cut=trouble == "cut")
