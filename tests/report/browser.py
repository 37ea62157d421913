"""Headless Chromium for tests, driven over its debugging pipe: no driver, no open port."""

from __future__ import annotations

import base64
import fcntl
import itertools
import json
import os
import select
import shutil
import signal
import time
from pathlib import Path
from typing import Any

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
_FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--remote-debugging-pipe",
]


class Browser:
    """One page of one browser; a context manager.

    Args:
        profile: an empty folder for the browser's files.
        timeout: seconds that any answer may take.
    """

    def __init__(self, profile: Path, timeout: float = 60.0) -> None:
        assert CHROMIUM is not None, "the caller checks that there is one"
        self._timeout = timeout
        self._ids = itertools.count(1)
        self._buffer = b""
        self.events: list[dict[str, Any]] = []
        # Above 10, and closed in the child: its 3 and 4 are put there below.
        read_child, self._write = (_above(fd) for fd in os.pipe())
        self._read, write_child = (_above(fd) for fd in os.pipe())

        nowhere = [(os.POSIX_SPAWN_OPEN, fd, os.devnull, os.O_WRONLY, 0) for fd in (1, 2)]
        self._pid = os.posix_spawn(
            CHROMIUM,
            [CHROMIUM, *_FLAGS, f"--user-data-dir={profile}", "about:blank"],
            os.environ,
            file_actions=[
                *nowhere,
                (os.POSIX_SPAWN_DUP2, read_child, 3),  # Chromium reads from 3
                (os.POSIX_SPAWN_DUP2, write_child, 4),  # and writes to 4
            ],
        )
        os.close(read_child)
        os.close(write_child)
        targets = self._call("Target.getTargets")["targetInfos"]
        page = next(target for target in targets if target["type"] == "page")
        attach = {"targetId": page["targetId"], "flatten": True}
        self._session: str | None = self._call("Target.attachToTarget", **attach)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *exception: object) -> None:
        os.kill(self._pid, signal.SIGTERM)
        os.waitpid(self._pid, 0)
        os.close(self._read)
        os.close(self._write)

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """A command of the page's session (DevTools protocol); its result."""
        return self._call(method, self._session, **params)

    def open(self, path: Path, width: int = 1200, dark: bool = False) -> None:
        """Loads a file at a width in CSS pixels and forgets earlier events."""
        self.resize(width)
        self.emulate_dark(dark)
        self.events.clear()
        self.call("Page.navigate", url=path.resolve().as_uri())
        self.wait_for("document.readyState === 'complete'")

    def resize(self, width: int) -> None:
        """Sets the viewport; below 500 pixels it is a phone."""
        phone = width < 500
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=900,
            deviceScaleFactor=2 if phone else 1,
            mobile=phone,
        )

    def emulate_dark(self, dark: bool) -> None:
        """Sets what the page sees as the reader's preference."""
        feature = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[feature])

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression; an exception there fails the test."""
        answer = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait_for(self, condition: str) -> None:
        """Until a JavaScript expression is true."""
        end = time.monotonic() + self._timeout
        while not self.evaluate(condition):
            assert time.monotonic() < end, f"never true: {condition}"
            time.sleep(0.02)

    def hover(self, selector: str, across: float) -> None:
        """Moves the mouse to half the height of an element, at a fraction of its width."""
        x, y = self._place(selector, across)
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def tap(self, selector: str, across: float) -> None:
        """A finger on that place, and off again."""
        x, y = self._place(selector, across)
        self.call("Emulation.setTouchEmulationEnabled", enabled=True)
        self.call("Input.dispatchTouchEvent", type="touchStart", touchPoints=[{"x": x, "y": y}])
        self.call("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])
        self.call("Emulation.setTouchEmulationEnabled", enabled=False)

    def _place(self, selector: str, across: float) -> tuple[float, float]:
        box = self.evaluate(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)});"
            "e.scrollIntoView({block: 'center'}); const b = e.getBoundingClientRect();"
            "return [b.left, b.top, b.width, b.height]; })()"
        )
        return box[0] + across * box[2], box[1] + box[3] / 2

    def print_pdf(self, path: Path) -> None:
        """The page on paper."""
        path.write_bytes(base64.b64decode(self.call("Page.printToPDF")["data"]))

    def problems(self) -> list[str]:
        """Console errors and warnings, uncaught exceptions, and blocked or failed loads."""
        messages = []
        for event in self.events:
            params = event["params"]
            match event["method"]:
                case "Runtime.exceptionThrown":
                    messages.append(json.dumps(params["exceptionDetails"]))
                case "Runtime.consoleAPICalled" if params["type"] in ("error", "warning", "assert"):
                    messages.append(json.dumps(params["args"]))
                case "Log.entryAdded" if params["entry"]["level"] in ("error", "warning"):
                    messages.append(params["entry"]["text"])
                case "Network.loadingFailed":
                    messages.append(params["errorText"])
        return messages

    def requests(self) -> list[str]:
        """What the page asked for since `open`; ``data:`` is part of the page."""
        urls = [
            event["params"]["request"]["url"]
            for event in self.events
            if event["method"] == "Network.requestWillBeSent"
        ]
        return [url for url in urls if not url.startswith("data:")]

    def _call(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        number = next(self._ids)
        message: dict[str, Any] = {"id": number, "method": method, "params": params}
        if session:
            message["sessionId"] = session
        content = memoryview(json.dumps(message).encode() + b"\0")
        while content:
            content = content[os.write(self._write, content) :]
        while (answer := self._next_message()).get("id") != number:
            if "method" in answer:
                self.events.append(answer)
        assert "error" not in answer, (method, answer)
        return answer["result"]

    def _next_message(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], self._timeout)
            assert ready, f"Chromium was silent for {self._timeout} s"
            read = os.read(self._read, 1 << 20)
            assert read, "Chromium ended"
            self._buffer += read
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)


def _above(fd: int) -> int:
    moved = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 10)
    os.close(fd)
    return moved
