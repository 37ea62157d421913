"""Opens local and remote files, so that a failed read can be repeated."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from typing import IO, Any, cast

import fsspec
from fsspec.spec import AbstractBufferedFile

from sparsellm.data.retry import is_transient, with_retries

# An attempt without an answer for so long has failed.
TIMEOUT_SECONDS = 10
_HUB = re.compile(r"hf://datasets/(?P<repo>[^@]+)@(?P<revision>[^/]+)/(?P<path>.+)")


def open_file(url: str) -> IO[bytes]:
    """A path, or an address of any protocol of fsspec's, for reading from any place.

    Raises:
        OSError, ValueError: whatever the protocol raises; `retry.with_retries` makes sense of it.
    """
    if found := _HUB.fullmatch(url):
        return cast(IO[bytes], _HubFile(**found.groupdict()))
    options: dict[str, Any] = {}
    if url.startswith(("http://", "https://")):
        import aiohttp

        patience = aiohttp.ClientTimeout(sock_connect=TIMEOUT_SECONDS, sock_read=TIMEOUT_SECONDS)
        options["client_kwargs"] = {"timeout": patience}
    file: IO[bytes] = fsspec.open(url, "rb", **options).open()
    return file


def open_steady(url: str) -> IO[bytes]:
    """As `open_file`, for a stream; a read that fails for a temporary reason is repeated."""
    file = with_retries(lambda: open_file(url), url)
    if "://" not in url:
        return file
    return cast(IO[bytes], _SteadyFile(url, file))


class _HubFile(AbstractBufferedFile):  # type: ignore[misc] # fsspec has no types
    """A file of a dataset on the Hugging Face hub, at a commit.

    fsspec's own asks the hub's API for the repository and a list of the folder first, in every
    process that opens a file: at many ranks and workers more than the hub allows.
    """

    def __init__(self, repo: str, revision: str, path: str) -> None:
        from huggingface_hub import get_hf_file_metadata, hf_hub_url

        self._url = hf_hub_url(repo, path, repo_type="dataset", revision=revision)
        size = get_hf_file_metadata(self._url).size
        if size is None:
            raise ValueError(f"{self._url}: the hub does not say how large it is")
        super().__init__(None, path, size=size)

    def _fetch_range(self, start: int, end: int) -> bytes:
        from huggingface_hub.utils import build_hf_headers, hf_raise_for_status, http_backoff

        headers = {"Range": f"bytes={start}-{end - 1}", **build_hf_headers()}
        answer = http_backoff(
            "GET", self._url, max_retries=0, headers=headers, timeout=TIMEOUT_SECONDS
        )
        hf_raise_for_status(answer)
        content: bytes = answer.content
        return content


class _SteadyFile(io.RawIOBase):
    """A file at an address that is opened again where the connection breaks."""

    def __init__(self, url: str, file: IO[bytes]) -> None:
        self._url, self._file = url, file
        self._place = 0

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        data: bytes = with_retries(lambda: self._attempt(lambda: self._file.read(size)), self._url)
        self._place += len(data)
        return data

    def _attempt(self, read: Callable[[], bytes]) -> bytes:
        if self._file.closed:
            self._file = open_file(self._url)
        self._file.seek(self._place)
        try:
            return read()
        except Exception as error:
            if is_transient(error):
                self._file.close()
            raise

    def close(self) -> None:
        self._file.close()
        super().close()
