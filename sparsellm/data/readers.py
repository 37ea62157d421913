"""Documents of a shard by blocks: random access, retries for what passes, names for what does not.

A block is a Parquet row group, `LINES_PER_BLOCK` lines of JSONL, or a whole group of source files.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import IO, Protocol, TypeVar

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import tenacity
from numpy.typing import NDArray

from sparsellm.data.corpus import Shard

LINES_PER_BLOCK = 1024
MAX_ATTEMPTS = 8

logger = logging.getLogger(__name__)
Result = TypeVar("Result")
Rows = NDArray[np.int64]


class ShardReader(Protocol):
    """An open shard."""

    block_sizes: list[int]  # rows of each block

    def read_rows(self, block: int, rows: Rows) -> list[str]:
        """The documents at ``rows`` of a block, in that order; a null is an empty document."""
        ...


def open_shard(shard: Shard) -> ShardReader:
    """Opens a shard.

    Raises:
        FileNotFoundError: it is missing.
        ValueError: it is damaged or has no such text field.
        ConnectionError: the network failed `MAX_ATTEMPTS` times.
    """
    if shard.format == "parquet":
        return ParquetReader(shard)
    if shard.format == "jsonl":
        return JsonlReader(shard)
    return SourcesReader(shard)


class ParquetReader:
    """A Parquet file through fsspec; only the text column is read."""

    def __init__(self, shard: Shard) -> None:
        self._shard = shard
        self._file = with_retries(self._open, shard.url)
        metadata = self._file.metadata
        field = shard.text_field
        if field not in self._file.schema_arrow.names:
            raise ValueError(
                f"{shard.url}: no column {field!r}; it has "
                f"{', '.join(self._file.schema_arrow.names)}. Set text_field in the corpus's YAML"
            )
        kind = self._file.schema_arrow.field(field).type
        texts = (
            pa.types.is_string,
            pa.types.is_large_string,
            pa.types.is_string_view,
            pa.types.is_null,
        )
        if not any(is_text(kind) for is_text in texts):
            raise ValueError(f"{shard.url}: column {field!r} holds {kind}, not text")
        self.block_sizes = [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]

    def _open(self) -> pq.ParquetFile:
        try:
            return pq.ParquetFile(fsspec.open(self._shard.url, "rb").open())
        except pa.ArrowInvalid as error:
            raise _damaged(self._shard, error) from error

    def read_rows(self, block: int, rows: Rows) -> list[str]:
        def read() -> pa.ChunkedArray:
            try:
                # Arrow would start a thread a core in every worker; the workers are the threads.
                table = self._file.read_row_group(
                    block, columns=[self._shard.text_field], use_threads=False
                )
                return table.column(0)
            except pa.ArrowInvalid as error:
                raise _damaged(self._shard, error) from error
            except OSError as error:
                # pyarrow reports corrupt pages as OSError too; what the network does is retried.
                if is_transient(error):
                    self._file = self._open()
                    raise
                raise _damaged(self._shard, error) from error

        # Only this consumer's rows become Python strings: where shards are divided by rows, the
        # others' are most of the block. Arrow's `take` would join the chunks of a column, which
        # fails above 2 GiB.
        column = with_retries(read, self._shard.url)
        return [self._text(column, block, row) for row in rows.tolist()]

    def _text(self, column: pa.ChunkedArray, block: int, row: int) -> str:
        try:
            return column[row].as_py() or ""
        except UnicodeDecodeError as error:
            raise ValueError(
                f"{self._shard.url}: row {row} of row group {block}: {self._shard.text_field!r} is "
                f"not UTF-8 ({error}); mend or remove the row, or take the shard out of the corpus"
            ) from error


class JsonlReader:
    """A JSONL file; one pass at opening finds where its blocks begin."""

    def __init__(self, shard: Shard) -> None:
        self._shard = shard
        self._starts: list[int] = []
        self.block_sizes: list[int] = []
        self._scan()

    def _scan(self) -> None:
        with self._open() as file:
            position = 0
            for number, line in enumerate(file):
                if number % LINES_PER_BLOCK == 0:
                    self._starts.append(position)
                    self.block_sizes.append(0)
                self.block_sizes[-1] += 1
                position += len(line)

    def _open(self) -> IO[bytes]:
        return with_retries(lambda: fsspec.open(self._shard.url, "rb").open(), self._shard.url)

    def read_rows(self, block: int, rows: Rows) -> list[str]:
        def read() -> list[bytes]:
            with self._open() as file:
                file.seek(self._starts[block])
                return [file.readline() for _ in range(self.block_sizes[block])]

        first = block * LINES_PER_BLOCK + 1
        lines = with_retries(read, self._shard.url)
        return [self._text(lines[row], first + row) for row in rows.tolist()]

    def _text(self, line: bytes, number: int) -> str:
        if not line.strip():
            return ""
        field = self._shard.text_field
        try:
            document = json.loads(line)
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise ValueError(
                f"{self._shard.url}: line {number} is not JSON ({error}); mend or remove the line"
            ) from error
        if not isinstance(document, dict) or not isinstance(document.get(field), str | None):
            raise ValueError(f"{self._shard.url}: line {number}: {field!r} is not text")
        if field not in document:
            raise ValueError(
                f"{self._shard.url}: line {number} has no key {field!r}; set text_field in the "
                "corpus's YAML"
            )
        return document[field] or ""


class SourcesReader:
    """Plain text files, one document each, in one block."""

    def __init__(self, shard: Shard) -> None:
        self._members = shard.members
        self.block_sizes = [len(shard.members)]

    def read_rows(self, block: int, rows: Rows) -> list[str]:
        paths = (Path(self._members[row]) for row in rows.tolist())
        return [path.read_text(encoding="utf-8", errors="replace") for path in paths]


def with_retries(action: Callable[[], Result], what: str) -> Result:
    """Runs ``action``, again with exponential backoff (1 to 60 s, jittered) while the cause passes.

    Raises:
        ConnectionError: it failed `MAX_ATTEMPTS` times.
        FileNotFoundError: the shard is missing.
        Exception: whatever is no passing trouble, at once.
    """
    try:
        for attempt in _retrying(what):
            with attempt:
                return action()
    except tenacity.RetryError as error:
        cause = error.last_attempt.exception()
        raise ConnectionError(
            f"{what}: gave up after {MAX_ATTEMPTS} attempts ({_one_line(cause)}). The run "
            "can be resumed when the network is back"
        ) from cause
    except Exception as error:
        status = _status(error)
        if isinstance(error, FileNotFoundError) or status in (404, 410):
            raise FileNotFoundError(
                f"{what} is missing ({_one_line(error)}); restore it, or take it out of the corpus"
            ) from error
        if status in (401, 403):
            raise ValueError(
                f"{what}: access was refused ({_one_line(error)}); if it is private or gated, set "
                "HF_TOKEN to a token that may read it"
            ) from error
        raise
    raise AssertionError("unreachable")


def _retrying(what: str) -> tenacity.Retrying:
    backoff = tenacity.wait_random_exponential(multiplier=1, min=1, max=60)

    def wait(state: tenacity.RetryCallState) -> float:
        assert state.outcome is not None
        return max(backoff(state), _retry_after(state.outcome.exception()))

    def warn(state: tenacity.RetryCallState) -> None:
        assert state.outcome is not None
        logger.warning(
            "%s: attempt %d of %d failed (%s); trying again in %.0f s",
            what,
            state.attempt_number,
            MAX_ATTEMPTS,
            _one_line(state.outcome.exception()),
            state.upcoming_sleep,
        )

    return tenacity.Retrying(
        retry=tenacity.retry_if_exception(is_transient),
        stop=tenacity.stop_after_attempt(MAX_ATTEMPTS),
        wait=wait,
        before_sleep=warn,
    )


def is_transient(error: BaseException) -> bool:
    """Whether waiting may help: 408, 429 and 5xx answers, timeouts, broken connections."""
    status = _status(error)
    if status is not None:
        return status in (408, 429) or status >= 500
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, ConnectionError | TimeoutError):
            return True
        # requests and httpx (whichever the hub's client uses) name these classes alike.
        names = {cls.__name__ for cls in type(seen).__mro__}
        if names & {
            "TimeoutException",
            "NetworkError",
            "ProtocolError",
            "ConnectionError",
            "Timeout",
        }:
            return True
        seen = seen.__cause__ or seen.__context__
    return False


def _status(error: BaseException | None) -> int | None:
    """HTTP status of an error or of what caused it."""
    while error is not None:
        status = getattr(getattr(error, "response", None), "status_code", None)
        if status is not None:
            return int(status)
        error = error.__cause__ or error.__context__
    return None


def _retry_after(error: BaseException | None) -> float:
    """Seconds that the server asked to wait, 0 if it did not; at most five minutes."""
    while error is not None:
        headers = getattr(getattr(error, "response", None), "headers", None)
        if headers is not None:
            value = str(headers.get("Retry-After", "0"))
            return min(float(value), 300.0) if value.isdigit() else 0.0
        error = error.__cause__ or error.__context__
    return 0.0


def _one_line(error: BaseException | None) -> str:
    return " ".join(str(error).split())


def _damaged(shard: Shard, error: Exception) -> ValueError:
    return ValueError(
        f"{shard.url} is damaged or no Parquet file ({_one_line(error)}); fetch it again, "
        "or take it out of the corpus"
    )
