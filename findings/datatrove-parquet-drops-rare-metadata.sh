#!/bin/sh
# Question: datatrove's ParquetWriter(expand_metadata=True) writes 2,500 documents. One in ten has a further key in its
#   metadata, "licence". What is in the file?
# Guess: a column "licence" with nulls, or an error, since the schemas do not agree.
# Seen (datatrove 0.10.1, pyarrow 26.0.1): no such column, without a message. The columns are those of the first of each
#   1,000 documents (batch_size), as pyarrow's from_pylist reads them, and keys that only others have are dropped. If each
#   of these first documents has the key, the column is there, with nulls. If only some of them have it, and if metadata
#   are not expanded, the writer fails, so that it looks as if schemas were checked. JsonlWriter keeps all keys, and so
#   does a schema that is passed.
# Hurts: labels that few documents have, as licences, flags of filters or PII, numbers of duplicates: the rarer the key, the
#   more likely the loss. Steps that read the file take them for absent.
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile datatrove==0.10.1 orjson==3.13.0 pyarrow==26.0.1 numpy==2.4.6
fi
"$PYTHON" - "$dir" 2>"$dir/log" <<'PY' || { tail -n 20 "$dir/log"; exit 1; }
import sys

import pyarrow as pa
from datatrove.data import Document
from datatrove.pipeline.readers import JsonlReader, ParquetReader
from datatrove.pipeline.writers import JsonlWriter, ParquetWriter


def documents(first):
    for i in range(2500):
        more = {"licence": "mit"} if i % 10 == 5 or (i == 0 and first) else {}
        yield Document(text="text", id=str(i), metadata={"url": "a.org"} | more)


def licences(name, writer, reader, first=False, **options):
    folder = f"{sys.argv[1]}/{name}"
    with writer(folder, **options) as file:
        for document in documents(first):
            file.write(document)
    back = list(reader(folder).run())
    count = sum(document.metadata.get("licence") is not None for document in back)
    keys = sorted(back[5].metadata.keys() - {"file_path"})
    print(f"{name}: {len(back):,} documents, {count} with a licence, keys {keys}")
    return count


schema = pa.schema([(key, pa.string()) for key in ("text", "id", "url", "licence")])
assert licences("JSON lines", JsonlWriter, JsonlReader, expand_metadata=True) == 250
assert licences("Parquet, with a schema", ParquetWriter, ParquetReader, expand_metadata=True, schema=schema) == 250
options = {"expand_metadata": True, "batch_size": 2500}
with_key_first = licences("Parquet, key in the first", ParquetWriter, ParquetReader, True, **options)
assert with_key_first == 251
for name, first, expand in [("key in one of three firsts", True, True), ("not expanded", False, False)]:
    try:
        licences(f"Parquet, {name}", ParquetWriter, ParquetReader, first, expand_metadata=expand)
    except ValueError as error:
        print(f"Parquet, {name}:", str(error).split(":")[0])
    else:
        raise AssertionError("the behaviour has changed")
assert licences("Parquet", ParquetWriter, ParquetReader, expand_metadata=True) == 0, "the behaviour has changed"
PY
