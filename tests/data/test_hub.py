"""The hub path for real: datasets and huggingface_hub against a hub on the loopback interface."""

import json
import re
from collections import Counter
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from conftest import ROOT, TINY, python, set_arguments
from warm import run

from data.fake_hub import REPO, REVISION, FakeHub
from sparsellm.data.stream import Cursor, LaneConfig, pack
from sparsellm.data.text.blocks import BlockCache
from sparsellm.data.text.corpus import load_corpus
from sparsellm.data.text.shards import to_shard
from sparsellm.data.tokenizer import load_tokenizer

READER = Path(__file__).with_name("hub_reader.py")
SHARDS = [[f"document {i} of shard {s}, " * (1 + i % 3) for i in range(9)] for s in range(5)]


@pytest.fixture
def corpus_file(tmp_path):
    path = tmp_path / "hub.yaml"
    path.write_text(
        f"source: hub\nrepo: {REPO}\nconfig: sample\nrevision: '{REVISION}'\n", encoding="utf-8"
    )
    return path


def _hub_env(hub, tmp_path):
    return {
        "HF_ENDPOINT": hub.endpoint,
        "HF_HUB_OFFLINE": "0",
        "HF_HOME": str(tmp_path / "cache"),
        "HF_HUB_DISABLE_XET": "1",
        "NO_PROXY": "127.0.0.1",
    }


def _read(hub, corpus_file, tmp_path, status=0):
    """In a process of its own: where the hub is was read when its client was imported."""
    return run(str(READER), str(corpus_file), status=status, **_hub_env(hub, tmp_path))


@pytest.mark.slow
def test_hub_troubles_change_nothing_but_the_time(corpus_file, tmp_path):
    with FakeHub(SHARDS) as hub:
        local = []
        for name, content in hub.files.items():
            if name.startswith("sample/") and "004" not in name:
                path = tmp_path / Path(name).name
                path.write_bytes(content)
                local.append(to_shard(str(path), "text"))
        config = LaneConfig(tuple(local), 0, 1, seed=3)
        stream = pack(config, BlockCache(), load_tokenizer("bytes"), 16, Cursor())

        hub.troubles = ["429", "500", "cut", "503"]
        rough = _read(hub, corpus_file, tmp_path)
        num_train, num_validation, sequences = json.loads(rough.stdout)
        assert (num_train, num_validation) == (4, 1)
        assert sequences == [next(stream)[0].tolist() for _ in range(40)]
        assert [entry for entry in hub.log if len(entry) == 3] == ["429", "500", "cut", "503"]


@pytest.mark.slow
def test_missing_shard_is_named(corpus_file, tmp_path):
    with FakeHub(SHARDS) as hub:
        real_entries = hub._entries()
        hub._entries = lambda: real_entries
        for name in list(hub.files):
            if name != "README.md":
                del hub.files[name]
        gone = _read(hub, corpus_file, tmp_path, status=1).stderr
    assert re.search(r"^FileNotFoundError: .*sample/00.* is missing", gone, re.M), gone


@pytest.mark.slow
def test_corrupt_shard_is_named(corpus_file, tmp_path):
    with FakeHub(SHARDS) as hub:
        for name, content in hub.files.items():
            if name != "README.md":
                hub.files[name] = content[:-8] + b"XXXXXXXX"
        corrupt = _read(hub, corpus_file, tmp_path, status=1).stderr
    assert re.search(r"^ValueError: .*sample/00.* damaged", corrupt, re.M), corrupt


def _lists(requests):
    """Requests that ask what there is, and not for a file."""
    return Counter(
        path
        for path in (request.split("?")[0].split(REPO)[-1] for request in requests)
        if path.startswith(("/tree/", "/revision/", "/paths-info/"))
    )


@pytest.mark.long
def test_one_rank_lists_the_hub_for_all_ranks_and_workers(corpus_file, tmp_path):
    overrides = [*TINY, f"logging.run_dir={tmp_path}", f"data.corpus={corpus_file}"]
    overrides += ["data.num_workers=2", "train.steps=2"]
    train = ["-m", "sparsellm", "train", "--recipe", "debug", "--set", "data.tokenizer=bytes"]
    launch = ["-m", "accelerate.commands.launch", "--main_process_port=0", "--num_processes=2"]
    launch.append(f"--config_file={ROOT / 'launch' / 'ddp8.yaml'}")
    with FakeHub(SHARDS) as hub:
        python(*launch, *train, *set_arguments(overrides), **_hub_env(hub, tmp_path))
        listings = _lists(hub.requests)
    assert listings[f"/tree/{REVISION}/sample"] == 1
    assert set(listings.values()) == {1}


@pytest.mark.slow
def test_fetch_makes_a_mirror_in_the_same_order_and_continues(corpus_file, tmp_path):
    command = ["-m", "sparsellm", "data", "fetch", str(corpus_file)]
    command += [str(tmp_path / "mirror"), "--shards", "3", "--workers", "1"]
    with FakeHub(SHARDS) as hub:
        run(*command, **_hub_env(hub, tmp_path))
        (tmp_path / "mirror" / "sample" / "001.parquet").unlink()
        hub.log.clear()
        run(*command, **_hub_env(hub, tmp_path))
        assert set(hub.log) & {f"sample/{i:03d}.parquet" for i in range(5)} == {
            "sample/001.parquet"
        }
    corpus = load_corpus(str(tmp_path / "mirror" / "hub.yaml"))
    names = [Path(shard.url).name for shard in (*corpus.train, *corpus.validation)]
    assert names == ["000.parquet", "001.parquet", "002.parquet", "004.parquet"]
    assert len(corpus.validation) == 1
    assert pq.read_table(corpus.train[1].url).column("text").to_pylist() == SHARDS[1]


def test_fetch_without_a_network_says_so_at_once(corpus_file, tmp_path, monkeypatch, error_of):
    from huggingface_hub import HfApi

    def refused(*_, **__):
        raise ConnectionError("connection refused")

    monkeypatch.setattr(HfApi, "dataset_info", refused)
    error = error_of("data", "fetch", corpus_file, tmp_path / "mirror")
    assert "the Hugging Face hub cannot be reached (connection refused)" in error
