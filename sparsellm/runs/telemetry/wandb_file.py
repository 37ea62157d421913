"""Reads back what wandb has written to the disk: the file of an offline run.

wandb's process writes it in blocks of 32 KiB. If it is killed, the file lacks records that `log`
has taken. The file is LevelDB's log format behind a header of 7 bytes: chunks of CRC-32 (4 bytes),
length (2) and type (1: whole, 2 to 4: first, middle and last of several). No chunk crosses the end
of a block.
"""

import json
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

_HEADER, _BLOCK = 7, 32_768
_WHOLE, _LAST = 1, 4


def logged_steps(path: Path, prefix: str) -> dict[str, int]:
    """The largest value of each key that begins with ``prefix``, without it, in all `log` calls."""
    from wandb.proto.wandb_internal_pb2 import Record

    steps: dict[str, int] = {}
    for chunk in _records(path.read_bytes()):
        if prefix.encode() not in chunk:
            continue
        for item in Record.FromString(chunk).history.item:
            name = "/".join(item.nested_key) or item.key
            if name.startswith(prefix):
                key, step = name.removeprefix(prefix), int(json.loads(item.value_json))
                steps[key] = max(steps.get(key, -1), step)
    return steps


def _records(content: bytes) -> Iterator[bytes]:
    """The complete records of a file."""
    at, parts = _HEADER, b""
    while at + _HEADER <= len(content):
        left_in_block = _BLOCK - at % _BLOCK
        if left_in_block < _HEADER:
            at += left_in_block
            continue
        crc, length, kind = struct.unpack_from("<IHB", content, at)
        at += _HEADER
        part = content[at : at + length]
        if zlib.crc32(part, zlib.crc32(bytes([kind]))) != crc:  # writing was cut off here
            return
        parts += part
        at += length
        if kind in (_WHOLE, _LAST):
            yield parts
            parts = b""
