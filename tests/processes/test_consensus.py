"""Ranks that would train on different things are told so before the first step."""

import json

import pytest
from conftest import ROOT, checkpoint_of, save_run, set_arguments
from warm import ranks

from sparsellm.data.text import identity
from sparsellm.data.text.corpus import load_corpora
from sparsellm.data.tokenizer import load_tokenizer
from sparsellm.processes import consensus
from sparsellm.processes.consensus import (
    agreed_checkpoint,
    compare_environments,
    compare_files,
    differences,
)
from sparsellm.processes.signals import StopRequest
from sparsellm.recipe.sections import DataConfig
from sparsellm.runs import checkpoint
from sparsellm.training.run import build_accelerator
from sparsellm.training.step import train_step


@pytest.fixture
def another_rank(monkeypatch):
    """Lets a second rank on host b have other values than this one."""

    def have(**changes):
        def gather(everyone):
            [entry] = everyone
            other = entry[1] | {key.replace("_", " "): value for key, value in changes.items()}
            return [entry, ("b", other)]

        monkeypatch.setattr(consensus, "gather_object", gather)

    return have


def test_who_has_what_is_said_the_most_common_last():
    values = [{"step": "4"}, {"step": "4"}, {"step": "6", "torch": "2"}]
    assert differences(values, "aab") == [
        "step: 6 on rank 2 (b), 4 on rank 0 (a), rank 1 (a)",
        "torch: 2 on rank 2 (b), nothing on rank 0 (a), rank 1 (a)",
    ]
    nine_ranks = [{"step": str(int(rank == 5))} for rank in range(9)]
    assert differences(nine_ranks, "a" * 9) == ["step: 1 on rank 5 (a), 0 on 8 ranks"]
    assert differences(values[:2], "aa") == []


def test_another_recipe_or_gpu_is_refused(tiny, another_rank):
    recipe = tiny()
    accelerator = build_accelerator(recipe)
    compare_environments(recipe, accelerator)
    another_rank(the_device="NVIDIA A100")
    with pytest.raises(
        ValueError, match=r"the device: cpu on rank 0 .*, NVIDIA A100 on rank 1 \(b\)"
    ):
        compare_environments(recipe, accelerator)
    another_rank(**{"the_recipe's train.steps": "5", "sparsellm": "0.0"})
    with pytest.raises(ValueError, match=r"the recipe's train.steps: 4 on rank 0 .*; sparsellm: "):
        compare_environments(recipe, accelerator)


def test_other_libraries_are_refused_and_other_settings_of_nccl_are_named(
    tiny, another_rank, monkeypatch, capsys
):
    recipe = tiny()
    accelerator = build_accelerator(recipe)
    for library in ("torch", "transformers", "CUDA of torch"):
        another_rank(**{library: "0.1"})
        with pytest.raises(ValueError, match=rf"differ in {library}: .* on rank 0 .*, 0.1 on "):
            compare_environments(recipe, accelerator)

    def gather(everyone):
        [entry] = everyone
        values = entry[1]
        if "the device" not in values:  # what nodes may differ in
            values = values | {"NCCL_IB_DISABLE": "1", "the driver": "9"}
        return [entry, ("b", values)]

    monkeypatch.setattr(consensus, "gather_object", gather)
    monkeypatch.delenv("NCCL_IB_DISABLE", raising=False)
    compare_environments(recipe, accelerator)
    output = capsys.readouterr().out
    assert "warning: the ranks differ in " in output
    assert "NCCL_IB_DISABLE: nothing on rank 0 (" in output
    assert ", 1 on rank 1 (b)" in output
    assert "the driver: " in output


@pytest.mark.slow
def test_a_rank_that_sees_other_text_is_named_fresh_or_resumed(
    tiny_overrides, tmp_path, monkeypatch
):
    """The edit keeps the size, and is where the samples of a fingerprint are not taken."""
    text = json.dumps({"text": "some text " * 40_000}) + "\n"
    other = tmp_path / "other"
    other.mkdir()
    corpus = {"files": "train", "validation_files": "held-out"}
    for name in corpus.values():  # each rank finds there what lies where it works
        (tmp_path / f"{name}.jsonl").symlink_to(f"/proc/self/cwd/{name}.txt")
        for folder in (tmp_path, other):
            (folder / f"{name}.txt").write_text(text)
    monkeypatch.chdir(tmp_path)
    overrides = [
        *tiny_overrides,
        "train.micro_batch_size=1",
        "data.corpus=local",
        "data.tokenizer=bytes",
    ]
    overrides += [f"data.{key}=[{tmp_path}/{name}.jsonl]" for key, name in corpus.items()]
    faulty = str(ROOT / "tests" / "training" / "faulty_rank.py")

    def train(folder, status):
        program = [faulty, "elsewhere", "1", str(folder), "train", "--recipe", "debug"]
        return ranks(2, *program, *set_arguments(overrides), status=status)

    for edited in corpus.values():
        (other / f"{edited}.txt").write_text(text[:99_999] + "?" + text[100_000:])
        refused = train(other, status=1)
        assert f"ranks differ in {tmp_path}/{edited}.jsonl: 400,013 bytes (" in refused.stderr
        if edited == "train":  # a run to resume
            train(tmp_path, status=0)
            (other / f"{edited}.txt").write_text(text)


def test_of_a_large_corpus_other_times_of_change_are_told(tiny, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(identity, "WHOLE_BYTES", 1000)
    paths = [tmp_path / "a.txt", tmp_path / "b.txt"]
    for path in paths:
        path.write_text("x" * 2000)
    corpora = load_corpora(
        DataConfig(corpus="local", files=[str(paths[0])], validation_files=[str(paths[1])])
    )
    shards = [*corpora[0].train, *corpora[0].validation]
    contents, times = identity.file_identities(shards)
    assert list(contents) == list(times) == [str(path) for path in paths]
    paths[1].unlink()
    assert identity.file_identities(shards)[0][str(paths[1])] == "No such file or directory"

    def gather(everyone):
        """The second rank's copy of the first file was written at another time."""
        [entry] = everyone
        values = entry[1]
        if values.get("files") == consensus.short_hash(times):
            return [entry, ("b", {"files": "other"})]
        return [entry, ("b", values | ({str(paths[0]): "17"} if values == times else {}))]

    paths[1].write_text("x" * 2000)
    times |= {str(paths[1]): str(paths[1].stat().st_mtime_ns)}
    monkeypatch.setattr(consensus, "gather_object", gather)
    accelerator = build_accelerator(tiny())
    monkeypatch.setattr(type(accelerator), "num_processes", 2)
    compare_files(corpora, load_tokenizer("bytes"), accelerator)
    output = capsys.readouterr().out
    assert f"too large to compare: {paths[0]}: {times[str(paths[0])]} on rank 0 (" in output


def test_the_checkpoint_is_compared_by_its_id(tiny, another_rank):
    recipe = tiny()
    path, accelerator = checkpoint_of(recipe), build_accelerator(recipe)
    assert agreed_checkpoint(recipe, accelerator, None, fresh=False) == path
    assert agreed_checkpoint(recipe, accelerator, None, fresh=True) is None
    another_rank(the_checkpoint="none")
    identity = checkpoint.load(path).manifest.id
    with pytest.raises(
        ValueError, match=rf"step_00000001 \({identity}\) on rank 0 .*, none on rank 1"
    ):
        agreed_checkpoint(recipe, accelerator, None, fresh=False)
    with pytest.raises(FileNotFoundError, match=r"is not a checkpoint"):
        agreed_checkpoint(recipe, accelerator, path / "nowhere", fresh=False)


def test_a_damaged_list_of_files_names_the_older_checkpoint_that_is_whole(build):
    run = build()
    paths = []
    for _ in range(2):
        train_step(run, StopRequest())
        paths.append(save_run(run))
    listed = paths[1] / "manifest.json"
    listed.write_bytes(listed.read_bytes().replace(b"0", b"1", 1))
    with pytest.raises(ValueError, match=rf"manifest.json is .* --resume {paths[0]} --set"):
        agreed_checkpoint(run.recipe, run.accelerator, None, fresh=False)
