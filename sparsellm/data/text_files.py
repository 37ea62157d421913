"""Opens local and remote files; what fails for a temporary reason is tried again."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import IO, Any, cast

import fsspec

from sparsellm.data.retry import with_retries

# An attempt without an answer for so long has failed.
TIMEOUT_SECONDS = 10
_HUB = re.compile(r"hf://datasets/(?P<repo>[^@]+)@(?P<revision>[^/]+)/(?P<path>.+)")


def open_file(url: str) -> IO[bytes]:
    """A path, or an address of any protocol of fsspec's, for reading from any place.

    Raises:
        FileNotFoundError, ValueError, ConnectionError: see `with_retries`; of an address, reading
            raises them too.
    """
    if "://" in url:
        return cast(IO[bytes], _SteadyFile(url))
    return with_retries(lambda: Path(url).open("rb"), url)


def _open_address(url: str) -> IO[bytes]:
    options: dict[str, Any] = {}
    if found := _HUB.fullmatch(url):
        # fsspec's own hf:// asks the hub's API for the repository and a list of the folder first,
        # in every process that opens a file: at many ranks and workers more than the hub allows.
        from huggingface_hub import hf_hub_url
        from huggingface_hub.utils import build_hf_headers

        url = hf_hub_url(found["repo"], found["path"], repo_type="dataset", revision=found[2])
        options["headers"] = build_hf_headers()
    if url.startswith(("http://", "https://")):
        import aiohttp

        patience = aiohttp.ClientTimeout(sock_connect=TIMEOUT_SECONDS, sock_read=TIMEOUT_SECONDS)
        options["client_kwargs"] = {"timeout": patience}
    file: IO[bytes] = fsspec.open(url, "rb", **options).open()
    return file


class _SteadyFile(io.RawIOBase):
    """A file at an address that is opened again where the connection breaks."""

    def __init__(self, url: str) -> None:
        self._url, self._place = url, 0
        self._file: IO[bytes] | None = None
        self._do("tell")

    def _do(self, method: str, *arguments: int) -> Any:
        def attempt() -> Any:
            if self._file is None:
                self._file = _open_address(self._url)
                self._file.seek(self._place)
            try:
                result = getattr(self._file, method)(*arguments)
                self._place = self._file.tell()
            except BaseException:
                self._file = None
                raise
            return result

        return with_retries(attempt, self._url)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._place

    def seek(self, offset: int, whence: int = 0) -> int:
        return int(self._do("seek", offset, whence))

    def read(self, size: int = -1) -> bytes:
        return bytes(self._do("read", size))

    def readline(self, size: int | None = -1) -> bytes:  # fsspec's take no size
        return bytes(self._do("readline"))
