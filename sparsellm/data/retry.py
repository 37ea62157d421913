"""Retries what fails over a network while the fault may be temporary; else one clear error."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import TypeVar

import tenacity

# Other ranks wait meanwhile. Together with the last attempt it stays under a minute.
MAX_SECONDS = 45.0
LEAST_WAIT_SECONDS = 1.0

logger = logging.getLogger(__name__)
Result = TypeVar("Result")


def with_retries(action: Callable[[], Result], what: str) -> Result:
    """Runs ``action`` again, with jittered exponential backoff, while a fault may be temporary.

    Raises:
        ConnectionError: it failed for `MAX_SECONDS`, or the server asks to wait for longer.
        FileNotFoundError: what ``what`` names is missing.
        ValueError: access is refused, or the server cannot be read from any place.
        Exception: any other error, at once.
    """
    backoff = tenacity.wait_random_exponential(min=LEAST_WAIT_SECONDS, max=20)

    def wait(state: tenacity.RetryCallState) -> float:
        return max(backoff(state), _retry_after(_error(state)))

    def warn(state: tenacity.RetryCallState) -> None:
        logger.warning(
            "%s: attempt %d failed (%s); trying again in %.0f s",
            what,
            state.attempt_number,
            one_line(_error(state)),
            state.upcoming_sleep,
        )

    retrying = tenacity.Retrying(
        retry=tenacity.retry_if_exception(is_transient),
        stop=tenacity.stop_before_delay(MAX_SECONDS),
        wait=wait,
        before_sleep=warn,
    )
    try:
        return retrying(action)
    except tenacity.RetryError as error:
        cause = error.last_attempt.exception()
        attempts = error.last_attempt.attempt_number
        times = f"{attempts} attempt{'s' * (attempts > 1)}"
        raise ConnectionError(
            f"{what}: gave up after {times} ({one_line(cause)}). The same command resumes when "
            "the network is back"
        ) from cause
    except Exception as error:
        status = _status(error)
        if isinstance(error, FileNotFoundError) or status in (404, 410):
            raise FileNotFoundError(
                f"{what} is missing ({one_line(error)}); restore it, or take it out of the corpus"
            ) from error
        if status in (401, 403):
            raise ValueError(
                f"{what}: access was refused ({one_line(error)}); if it is private or gated, set "
                "HF_TOKEN to a token that may read it"
            ) from error
        if "support range requests" in str(error):  # fsspec's
            raise ValueError(
                f"{what}: its server gives whole files only, and no ranges of bytes; download it, "
                "or serve it by one that does"
            ) from error
        raise


def _error(state: tenacity.RetryCallState) -> BaseException:
    assert state.outcome is not None
    error = state.outcome.exception()
    assert error is not None
    return error


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


def one_line(error: BaseException | None) -> str:
    """The message of an error without line breaks."""
    return " ".join(str(error).split())
