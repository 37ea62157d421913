#!/bin/sh
# Question: shards of a corpus are joined, `cat a.jsonl.zst b.jsonl.zst c.jsonl.zst`, or compressed by pzstd, which gives a
#   file of several frames. zstd, gzip and bz2 read such files whole. What does the Python package zstandard read?
# Guess: the whole file, by each of its functions, as its own zstandard.open does.
# Seen (zstandard 0.25.0, lz4 4.4.5): zstandard.open, stream_reader and copy_stream read all of it. decompress(data) and
#   read_to_iter return the first frame, a third of the lines below, without an error. pzstd begins with a frame without
#   content, so read_to_iter gives nothing for its files, and decompress raises. decompress has a parameter
#   read_across_frames, which is not implemented: True raises. lz4.frame.decompress reads one frame as well, and
#   lz4.frame.open all of them.
# Hurts: loops over .jsonl.zst files by read_to_iter, which needs the least memory, and whole shards read by decompress: the
#   rest of each joined file is lost, and the counts of a corpus are too small. Use stream_reader.
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile zstandard==0.25.0 lz4==4.4.5
fi
"$PYTHON" - "$dir" <<'PY'
import bz2
import gzip
import io
import json
import sys

import lz4.frame
import zstandard

shards = ["".join(json.dumps({"shard": shard, "row": row}) + "\n" for row in range(20_000)).encode() for shard in range(3)]
joined = b"".join(zstandard.ZstdCompressor().compress(shard) for shard in shards)
skipped = bytes.fromhex("502a4d18 04000000") + len(joined).to_bytes(4, "little")  # a frame that holds a number only
as_by_pzstd = skipped + joined
path = f"{sys.argv[1]}/joined.jsonl.zst"
with open(path, "wb") as file:
    file.write(joined)
decompressor = zstandard.ZstdDecompressor()


def copied(data):
    output = io.BytesIO()
    decompressor.copy_stream(io.BytesIO(data), output)
    return output.getvalue()


def iterated(data):
    return b"".join(decompressor.read_to_iter(io.BytesIO(data)))


with zstandard.open(path, "rt") as file:
    seen = {"open": sum(1 for _ in file)}
seen["stream_reader"] = decompressor.stream_reader(io.BytesIO(joined)).read().count(b"\n")
seen["copy_stream"] = copied(joined).count(b"\n")
seen["decompress"] = decompressor.decompress(joined).count(b"\n")
seen["read_to_iter"] = iterated(joined).count(b"\n")
seen["read_to_iter, as by pzstd"] = iterated(as_by_pzstd).count(b"\n")
joined_lz4 = b"".join(lz4.frame.compress(shard) for shard in shards)
seen["lz4.frame.open"] = sum(1 for _ in lz4.frame.open(io.BytesIO(joined_lz4)))
seen["lz4.frame.decompress"] = lz4.frame.decompress(joined_lz4).count(b"\n")
print("zstandard", zstandard.__version__, *(f"{name}: {count:,} of 60,000 lines" for name, count in seen.items()), sep="\n")
for module in (gzip, bz2):
    assert module.decompress(b"".join(module.compress(shard) for shard in shards)).count(b"\n") == 60_000
assert seen["open"] == seen["stream_reader"] == seen["copy_stream"] == seen["lz4.frame.open"] == 60_000
assert decompressor.stream_reader(io.BytesIO(as_by_pzstd)).read().count(b"\n") == 60_000
assert seen["decompress"] == seen["read_to_iter"] == seen["lz4.frame.decompress"] == 20_000, "the behaviour has changed"
assert seen["read_to_iter, as by pzstd"] == 0, "the behaviour has changed"
try:
    decompressor.decompress(joined, read_across_frames=True)
except zstandard.ZstdError as error:
    print("decompress(read_across_frames=True):", error)
PY
