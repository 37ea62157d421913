"""Every byte of a checkpoint is accounted for."""

import json
from pathlib import Path

import pytest
import torch
import xxhash
from hypothesis import given, strategies as st
from safetensors.torch import load_file

from runs.test_checkpoint import _snapshot
from sparsellm.runs import checkpoint, manifest, saver
from sparsellm.runs.tensor_files import Part, StoredPart, stored_parts, write_parts

FILES = [
    "manifest.json",
    "model.safetensors",
    "optimizer.safetensors",
    "rank_00000.json",
    "rank_00000.safetensors",
    "recipe.yaml",
    "stats.safetensors",
    "trainer.json",
]


@pytest.fixture
def folder(tmp_path):
    for step in (1, 2):
        saver.save(tmp_path, _snapshot(step), keep=2)
    return tmp_path


def test_what_still_reads_as_json_is_refused_too(folder):
    path = folder / "step_00000002"
    trainer = (path / "trainer.json").read_text()
    (path / "trainer.json").write_text(trainer.replace('"step": 2', '"step": 3'))
    with pytest.raises(ValueError, match=r"trainer.json is .*damaged"):
        checkpoint.load(path)


def test_of_two_damaged_checkpoints_neither_is_offered(folder):
    for step in (1, 2):
        (folder / f"step_{step:08d}" / "recipe.yaml").write_text("name: r3\n")
    with pytest.raises(ValueError, match=r"02/recipe.yaml is .*damaged.*older check") as error:
        checkpoint.load(folder / "step_00000002")
    assert "--resume" not in str(error.value)


def test_every_rank_verifies_its_share(folder, monkeypatch):
    verified = []
    real = manifest._chunk_hash
    monkeypatch.setattr(
        manifest, "_chunk_hash", lambda job: verified.append(job[0].name) or real(job)
    )
    for rank in range(3):
        checkpoint.load(folder / "step_00000002", rank, world_size=3)
    shared = [name for name in verified if name not in ("trainer.json", "recipe.yaml")]
    assert sorted(shared) == [n for n in FILES if n.endswith("s") or n == "rank_00000.json"]


def test_a_manifest_that_an_earlier_version_wrote_keeps_its_hash(tmp_path):
    written = {
        "id": "5e1c",
        "ancestors": ["77ab"],
        "step": 3,
        "created": "2026-11-20T08:00:00.000+00:00",
        "world_size": 2,
        "files": {"b": {"size": 1, "xxh3_128": ["0f"]}, "a": {"size": 0, "xxh3_128": []}},
        "xxh3_128": "f098e324712c9c73afa88da835a645ac",
    }
    (tmp_path / "manifest.json").write_text(json.dumps(written))
    content = manifest.read_manifest(tmp_path)
    assert (content.id, content.step, content.files["b"].size) == ("5e1c", 3, 1)


RECTANGLES = st.tuples(
    *(st.tuples(st.integers(0, size - 1), st.integers(1, size)) for size in (5, 7))
).map(lambda sides: [(first, min(length, 7 - first)) for first, length in sides])


@given(stored=RECTANGLES, held=RECTANGLES)
def test_a_stored_and_a_held_part_have_their_common_elements(stored, held):
    whole = torch.arange(49).reshape(7, 7)
    one, other = (
        whole[tuple(slice(first, first + length) for first, length in sides)]
        for sides in (stored, held)
    )
    (offsets, shape), begins = zip(*stored, strict=True), tuple(first for first, _ in held)
    part = StoredPart(Path("x.safetensors"), "w", torch.int64, shape, offsets)
    common = part.common_with(Part(other, begins))
    if common is None:
        assert not set(one.flatten().tolist()) & set(other.flatten().tolist())
    else:
        assert torch.equal(one[common[0]], other[common[1]])
        shared = set(one.flatten().tolist()) & set(other.flatten().tolist())
        assert set(one[common[0]].flatten().tolist()) == shared


def test_a_file_of_a_megabyte_has_one_hash(tmp_path):
    content = bytes(range(256)) * 4096
    entry = manifest.write_pieces(tmp_path / "x", [memoryview(content)])
    assert entry.xxh3_128 == [xxhash.xxh3_128_hexdigest(content)]


def test_chunks_are_hashed_where_they_lie(tmp_path, monkeypatch):
    monkeypatch.setattr(manifest, "CHUNK_BYTES", 1000)
    monkeypatch.setattr(manifest, "_READ_BYTES", 300)
    tensors = {
        "a": torch.arange(700, dtype=torch.int64).reshape(7, 100),
        "b": torch.tensor(3, dtype=torch.uint8),
        "c": torch.randn(5, 3).bfloat16(),
        "none": torch.empty(0, 4),
    }
    parts = {name: Part(tensor, (0,) * tensor.dim()) for name, tensor in tensors.items()}
    entry = write_parts(tmp_path / "x.safetensors", parts)
    assert entry.size == (tmp_path / "x.safetensors").stat().st_size
    assert len(entry.xxh3_128) == -(-entry.size // 1000)
    theirs = load_file(tmp_path / "x.safetensors")
    assert all(torch.equal(theirs[name], tensor) for name, tensor in tensors.items())
    assert {part.name for part in stored_parts(tmp_path / "x.safetensors")} == set(tensors)
    present = manifest.Manifest(
        id="0", ancestors=[], step=0, created="", world_size=1, files={"x.safetensors": entry}
    )
    manifest.write_manifest(tmp_path, present)
    manifest.verify(tmp_path, ["x.safetensors"])
    content = bytearray((tmp_path / "x.safetensors").read_bytes())
    content[2500] ^= 128
    (tmp_path / "x.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match=r"from byte 2,000 on it is not what was written"):
        manifest.verify(tmp_path, ["x.safetensors"])
