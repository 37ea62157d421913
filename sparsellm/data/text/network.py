"""Opens local and remote files; what fails for a temporary reason is tried again."""

import io
import logging
import random
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, TypeVar, cast

import fsspec

# An attempt without an answer for so long has failed.
TIMEOUT_SECONDS = 10
# Other ranks wait meanwhile. Together with the last attempt it stays under a minute.
MAX_SECONDS = 45.0
LEAST_WAIT_SECONDS = 1.0
MOST_WAIT_SECONDS = 20.0
_HUB = re.compile(r"hf://datasets/(?P<repo>[^@]+)@(?P<revision>[^/]+)/(?P<path>.+)")

logger = logging.getLogger(__name__)
Result = TypeVar("Result")


def open_file(url: str) -> IO[bytes]:
    """Opens a path, or an address of any of fsspec's protocols, for reading at any position.

    Raises:
        FileNotFoundError, ValueError, ConnectionError: see `with_retries`; for an address, reading
            raises them too.
    """
    if "://" in url:
        return cast(IO[bytes], _SteadyFile(url))
    return with_retries(lambda: Path(url).open("rb"), url)


def _open_address(url: str) -> IO[bytes]:
    options: dict[str, Any] = {}
    if match := _HUB.fullmatch(url):
        # fsspec's own hf:// asks the hub's API for the repository and a list of the folder first,
        # in every process that opens a file: at many ranks and workers more than the hub allows.
        from huggingface_hub import hf_hub_url
        from huggingface_hub.utils import build_hf_headers

        url = hf_hub_url(match["repo"], match["path"], repo_type="dataset", revision=match[2])
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


def with_retries(action: Callable[[], Result], resource: str) -> Result:
    """Runs ``action`` again, with jittered exponential backoff, while a fault may be temporary.

    Raises:
        ConnectionError: it failed for `MAX_SECONDS`, or the server asks to wait for longer.
        FileNotFoundError: ``resource`` is missing.
        ValueError: access is refused, or the server does not support ranges of bytes.
        Exception: any other error, at once.
    """
    attempt, end = 1, time.monotonic() + MAX_SECONDS
    while True:
        try:
            return action()
        except Exception as error:
            if not is_transient(error):
                _raise_with_remedy(error, resource)
                raise
            # Random, so that many ranks do not all come back at once; a server may ask for longer.
            longest = max(LEAST_WAIT_SECONDS, min(2.0 ** (attempt - 1), MOST_WAIT_SECONDS))
            wait = max(random.uniform(LEAST_WAIT_SECONDS, longest), _retry_after(error))
            if time.monotonic() + wait >= end:
                times = f"{attempt} attempt{'s' * (attempt > 1)}"
                raise ConnectionError(
                    f"{resource}: gave up after {times} ({one_line(error)}). The same command "
                    "resumes when the network is back"
                ) from error
            logger.warning(
                "%s: attempt %d failed (%s); trying again in %.0f s",
                resource,
                attempt,
                one_line(error),
                wait,
            )
        time.sleep(wait)
        attempt += 1


def _raise_with_remedy(error: Exception, resource: str) -> None:
    """Raises an error together with its remedy if there is one; returns otherwise."""
    status = _status(error)
    if isinstance(error, FileNotFoundError) or status in (404, 410):
        raise FileNotFoundError(
            f"{resource} is missing ({one_line(error)}); restore it, or take it out of the corpus"
        ) from error
    if status in (401, 403):
        raise ValueError(
            f"{resource}: access was refused ({one_line(error)}); if it is private or gated, set "
            "HF_TOKEN to a token that may read it"
        ) from error
    if "support range requests" in str(error):  # fsspec's
        raise ValueError(
            f"{resource}: its server gives whole files only, not ranges of bytes; download it, or "
            "serve it by one that does"
        ) from error


def is_transient(error: BaseException) -> bool:
    """Whether waiting may help: 408, 429 and 5xx answers, timeouts, broken connections."""
    status = _status(error)
    if status is not None:
        return status in (408, 429) or status >= 500
    return any(
        isinstance(each, ConnectionError | TimeoutError)
        or not _NETWORK_ERRORS.isdisjoint(cls.__name__ for cls in type(each).__mro__)
        for each in _with_causes(error)
    )


# requests and httpx (whichever the hub's client uses) name these classes alike; the first two are
# aiohttp's, which fsspec has for http://.
_NETWORK_ERRORS = {
    "ClientConnectionError",
    "ClientPayloadError",
    "TimeoutException",
    "NetworkError",
    "ProtocolError",
    "ConnectionError",
    "Timeout",
}


def has_no_answer(error: BaseException) -> bool:
    """Whether no server answered at all."""
    return _status(error) is None and is_transient(error)


def _with_causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _status(error: BaseException) -> int | None:
    """HTTP status of an error or of what caused it."""
    for each in _with_causes(error):
        # aiohttp's errors have it themselves.
        answer = getattr(each, "response", None)
        status = getattr(answer, "status_code", getattr(each, "status", None))
        if isinstance(status, int):
            return status
    return None


def _retry_after(error: BaseException) -> float:
    """Seconds that the server asked to wait, 0 if it did not; at most five minutes."""
    for each in _with_causes(error):
        headers = getattr(getattr(each, "response", each), "headers", None)
        if headers is not None:
            value = str(headers.get("Retry-After", "0"))
            return min(float(value), 300.0) if value.isdigit() else 0.0
    return 0.0


def one_line(error: BaseException) -> str:
    """The message of an error without line breaks."""
    return " ".join(str(error).split())
