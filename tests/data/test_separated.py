"""Text files of many documents: each is found once, and what would be missed is told."""

import gzip
import json
import random
import re
from types import SimpleNamespace

import numpy as np
import pytest

from sparsellm.data.first_look import check_text
from sparsellm.data.text import separated
from sparsellm.data.text.blocks import documents_in_order, open_shard
from sparsellm.data.text.corpus import load_corpora
from sparsellm.data.text.separated import SeparatedReader
from sparsellm.data.text.shards import Shard
from sparsellm.recipe.sections import DataConfig

EOT = "<|endoftext|>"
STORIES = [f"Story {i}, of a naïve dog. " + "It ran. " * (i % 7) for i in range(200)]


def _shard(path, separator=EOT, compression=None):
    return Shard(str(path), "sources", "text", compression, (str(path),), separator)


def _read(reader, order):
    blocks = {}
    for index in order:
        block = reader.read(index)
        blocks[index] = block.documents(np.arange(len(block)))
    return [text for index in sorted(blocks) for text in blocks[index]]


@pytest.mark.parametrize("separator", [EOT, "\n\n", "\x1e", "§"])
@pytest.mark.parametrize("block_bytes", [7, 64, 1000, 10**6])
def test_each_document_is_in_one_block(tmp_path, monkeypatch, separator, block_bytes):
    monkeypatch.setattr(separated, "BLOCK_BYTES", block_bytes)
    path = tmp_path / "a.txt"
    path.write_text("\ufeff" + separator.join(STORIES))
    reader = open_shard(_shard(path, separator))
    assert isinstance(reader, SeparatedReader)
    order = list(range(reader.num_blocks))
    assert len(order) == -(-path.stat().st_size // block_bytes)
    assert _read(reader, order) == STORIES
    random.Random(block_bytes).shuffle(order)
    assert _read(open_shard(_shard(path, separator)), order) == STORIES
    reader.close()


def test_line_breaks_around_a_separator_are_of_no_document(tmp_path):
    path = tmp_path / "stories.txt.gz"
    path.write_bytes(gzip.compress(f"\r\n{EOT}\n".join(STORIES).encode() + EOT.encode() + b"\n"))
    [contents] = documents_in_order((_shard(path, compression="gzip"),))
    assert [text for text in contents if text] == STORIES


def test_a_file_without_its_separator_is_one_document_and_read_once(tmp_path, monkeypatch):
    monkeypatch.setattr(separated, "BLOCK_BYTES", 64)
    path = tmp_path / "a.txt"
    path.write_text("word " * 2000)
    reader = open_shard(_shard(path))
    read, sizes = reader._file.read, []
    counting = SimpleNamespace(
        seek=reader._file.seek, read=lambda size: sizes.append(size) or read(size)
    )
    monkeypatch.setattr(reader, "_file", counting)
    assert _read(reader, range(reader.num_blocks)) == ["word " * 2000]
    assert sum(sizes) < 3 * path.stat().st_size


def test_what_is_not_utf_8_is_refused(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"fine" + EOT.encode() + "café".encode("latin-1"))
    with pytest.raises(ValueError, match=r"a\.txt is not UTF-8 text \(.*byte 0xe9.*iconv"):
        _read(open_shard(_shard(path)), [0])


def test_a_separator_within_texts_is_told_and_the_key_divides_them(tmp_path):
    path = tmp_path / "stories.txt"
    path.write_text(f"\n{EOT}\n".join(STORIES))
    data = DataConfig(corpus=str(path), tokenizer="bytes")
    number, warning = check_text(data, 16, validates=True)
    assert number == (
        "corpus local: 1 document to train on, 1 held out (of the one that is divided, its end)"
    )
    (times,) = re.findall(r"holds <.endoftext.> (\d+) times", warning)
    assert 195 <= int(times) <= 199  # all but those in the end that is held out
    assert f"set data.document_separator={EOT} (of a mixture, in" in warning
    divided = DataConfig(corpus=str(path), tokenizer="bytes", document_separator=EOT)
    (corpus,) = load_corpora(divided)
    texts = [
        [text for contents in documents_in_order(side) for text in contents if text]
        for side in (corpus.train, corpus.validation)
    ]
    assert sorted(texts[0] + texts[1]) == sorted(STORIES)
    assert check_text(divided, 16, validates=True) == [
        f"corpus local: {len(texts[0])} documents to train on, {len(texts[1])} held out"
    ]
    (undivided,) = load_corpora(data)
    assert corpus.fingerprint != undivided.fingerprint


def test_of_rows_the_remedy_is_another(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": f"{s}{EOT}{s}"}) + "\n" for s in STORIES))
    problem = check_text(DataConfig(corpus=str(path), tokenizer="bytes"), 16, validates=False)
    assert problem[1].endswith("divide such rows beforehand")
    with pytest.raises(ValueError, match=r"document_separator '\|' is for \.txt files"):
        check_text(DataConfig(corpus=str(path), document_separator="|"), 16, validates=False)
    with pytest.raises(ValueError, match=r"data.document_separator apply to a single corpus"):
        load_corpora(DataConfig(corpus={"a": 1.0, "b": 1.0}, document_separator="|"))
