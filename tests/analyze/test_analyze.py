"""Traces and their statistics: against brute force, and against figures of a real pilot model."""

import json
import resource
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import checkpoint_of
from hypothesis import given, settings, strategies as st

from sparsellm.analyze.activity import (
    activation_patterns,
    analyze,
    held_out_corpora,
    held_out_tokens,
)
from sparsellm.analyze.tally import LayerTally, TokenTally
from sparsellm.analyze.trace import Trace, load_traces, save_traces
from sparsellm.data.text.blocks import texts_in_order
from sparsellm.runs.huggingface.pretrained import load_pretrained


def _trace(active_MN: np.ndarray) -> Trace:
    return Trace(
        active_MN.sum(1).astype(np.uint16),
        active_MN.nonzero()[1].astype(np.uint16),
        active_MN.shape[1],
    )


CPU = torch.device("cpu")


def _statistics(active_MN: np.ndarray, batches: list[int]) -> dict:
    """In batches of so many tokens, the last of which takes what is left."""
    tally = LayerTally(active_MN.shape[1], CPU)
    for part in np.split(active_MN, np.cumsum(batches)):
        if len(part):
            assert tally.update(torch.from_numpy(part)).tolist() == part.sum(1).tolist()
    return tally.statistics()


@settings(deadline=None)  # the first example took 257 ms, others 2
@given(st.integers(1, 200), st.integers(1, 600), st.floats(0, 1), st.integers(0, 2**32 - 1))
def test_statistics_equal_brute_force(tokens, neurons, density, seed):
    rng = np.random.default_rng(seed)
    active = rng.random((tokens, neurons)) < density * rng.random(neurons)
    statistics = _statistics(active, rng.integers(1, 100, 3).tolist())
    count = active.sum(1)
    assert statistics["nnz_mean"] == pytest.approx(count.mean())
    assert statistics["nnz_max"] == count.max()
    for percent in (50, 99):
        threshold = statistics[f"nnz_p{percent}"]
        assert (count <= threshold).mean() >= percent / 100
        assert (count < threshold).mean() < percent / 100
    padded = np.pad(active, ((0, -tokens % 256), (0, -neurons % 256)))
    assert statistics["tile_max"] == padded.reshape(len(padded), -1, 256).sum(2).max()
    for size in (64, 128, 256):
        blocks = [active[i : i + size].any(0).sum() for i in range(0, tokens, size)]
        assert statistics["union"][str(size)] == pytest.approx(np.mean(blocks))
    popular = np.sort(active.sum(0))[::-1]
    for top in (128, 256, 512, 1024):
        expected = popular[:top].sum() / max(popular.sum(), 1)
        assert statistics["hot_share"][str(top)] == pytest.approx(expected)
    assert statistics["never_fired_fraction"] == pytest.approx((~active.any(0)).mean())


def test_figures_of_a_real_model(test_data):
    traces, _ = load_traces(test_data / "traces" / "pilot_nnz16-44.npz", 5632)
    layers = []
    for trace in (traces[0], traces[5]):
        layers.append(_statistics(trace.pattern().numpy(), [6000, 2000]))
    # Mean, median, p99, max, most in a tile, unions, shares: as published with it.
    first = layers[0]
    assert [round(first["nnz_mean"], 1), first["nnz_p50"], first["nnz_p99"]] == [26.2, 12, 125]
    assert [first["nnz_max"], first["tile_max"]] == [5606, 256]
    assert [round(x) for x in first["union"].values()] == [777, 1190, 1733]
    assert [round(100 * x) for x in first["hot_share"].values()] == [22, 33, 47, 64]
    last = layers[1]
    assert [round(last["nnz_mean"], 1), last["tile_max"]] == [44.4, 51]
    assert round(100 * last["never_fired_fraction"]) == 7


def test_token_extremes_leave_out_what_is_rare():
    tally = TokenTally(10, CPU)
    tally.update(torch.tensor([1, 1, 2]), torch.tensor([5.0, 7, 1]))
    tally.update(torch.tensor([2, 3, 4, 4]), torch.tensor([1.0, 99, 10, 20]))
    lowest, highest = tally.extremes(num=2, min_count=2)
    assert lowest == [(2, 1.0, 2), (1, 6.0, 2)]
    assert highest == [(4, 15.0, 2), (1, 6.0, 2)]


@pytest.fixture
def checkpoint(tiny):
    return checkpoint_of(tiny())


def test_traces_equal_the_statistics_of_the_model(checkpoint):
    pretrained = load_pretrained(checkpoint)
    tokens = torch.randint(257, (3, 32))
    batches = list(activation_patterns(pretrained, iter([tokens[:2], tokens[2:]])))
    assert torch.cat([batch_BT for batch_BT, _ in batches]).tolist() == tokens.tolist()
    for layer in range(2):
        active_MN = torch.cat([patterns[layer] for _, patterns in batches])
        layer_stats = []
        block = pretrained.model.model.layers[layer]
        original = block.forward

        def spy(hidden, original=original, layer_stats=layer_stats, **attention):
            out, stats = original(hidden, return_stats=True, **attention)
            layer_stats.append(stats)
            return out

        block.forward = spy
        with torch.no_grad():
            pretrained.model.model(tokens, use_cache=False)
        block.forward = original
        assert active_MN.sum(1).tolist() == layer_stats[0].nnz_M.tolist()
        assert active_MN.sum(0).tolist() == layer_stats[0].active_N.tolist()


def test_the_command_writes_statistics_and_traces(checkpoint, cli_here):
    printed = cli_here("analyze", checkpoint, "--tokens", "512").stdout
    assert "512 tokens, 64 neurons per layer" in printed
    assert "frequent tokens for which the most neurons are active, on average: '" in printed
    folder = checkpoint.with_name(f"analysis_{checkpoint.name}")  # stays when that is pruned
    statistics = json.loads((folder / "statistics.json").read_text())
    shape = {"tokens": 512, "context_length": 32, "intermediate_size": 64}
    source = {"checkpoint": str(checkpoint), "step": 1, "corpus": "sample"}
    assert shape | source == {key: statistics[key] for key in (*shape, *source)}
    assert len(statistics["layers"]) == 2
    assert len(statistics["tokens_by_nnz"]["highest"]) > 0
    traces, ids_BT = load_traces(folder / "traces.npz", 64)
    assert ids_BT.size == 512
    common = statistics["tokens_by_nnz"]["highest"][0]
    assert (ids_BT == common["id"]).sum() == common["occurrences"] >= 8
    assert common["text"] == bytes([common["id"]]).decode(errors="replace")
    mean = [float(trace.count_M.mean()) for trace in traces]
    assert mean == pytest.approx([layer["nnz_mean"] for layer in statistics["layers"]])


def test_results_of_the_working_directory_lie_beside_it(checkpoint, monkeypatch, cli_here):
    monkeypatch.chdir(checkpoint)
    cli_here("analyze", ".", "--tokens", "128")
    assert (checkpoint.parent / f"analysis_{checkpoint.name}" / "traces.npz").is_file()


def test_a_full_disk_leaves_the_earlier_traces_and_names_the_file(
    checkpoint, tmp_path, error_of, cli_here
):
    out = tmp_path / "out"
    command = ["analyze", str(checkpoint), "--tokens", "512", "--out", str(out)]
    cli_here(*command)
    before = (out / "traces.npz").read_bytes()
    # The kernel refuses the write as it does on a full disk; only the error's number differs.
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before), limits[1]))
    try:
        error = error_of(*command, "--tokens", "2048")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert f"File too large: '{out / 'traces.npz'}'" in error
    assert (out / "traces.npz").read_bytes() == before
    assert sorted(path.name for path in out.iterdir()) == ["statistics.json", "traces.npz"]


def test_results_of_a_model_on_the_hub_are_not_written_to_its_cache(
    checkpoint, tmp_path, monkeypatch, cli_here
):
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: str(checkpoint))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    printed = cli_here("analyze", "me/model", "--tokens", "128").stdout
    assert "wrote analysis_me--model/statistics.json" in printed
    assert Path("analysis_me--model/traces.npz").is_file()
    assert not list(checkpoint.parent.glob("analysis*"))


def test_some_layers_patterns_can_be_kept_alone(checkpoint, tmp_path, error_of, cli_here):
    command = ["analyze", str(checkpoint), "--tokens", "128", "--out"]
    cli_here(*command, tmp_path / "all")
    cli_here(*command, tmp_path / "one", "--trace-layers", "1")
    (_, second), _ = load_traces(tmp_path / "all" / "traces.npz", 64)
    [alone], _ = load_traces(tmp_path / "one" / "traces.npz", 64)
    assert alone.index.tolist() == second.index.tolist()
    assert "has layers 0 to 1" in error_of(*command, tmp_path / "none", "--trace-layers", "2")


def test_what_is_counted_and_what_is_kept_are_asked_for_apart(checkpoint):
    pretrained = load_pretrained(checkpoint)
    corpora = held_out_corpora(pretrained.recipe, None)
    statistics, few, few_ids = analyze(pretrained, corpora, 512, 3, trace_tokens=128)
    whole, all_of_it, all_ids = analyze(pretrained, corpora, 512, 2, trace_tokens=512)
    assert statistics == whole  # whatever the batch, whatever is kept
    assert (few_ids.shape, all_ids.shape) == ((4, 32), (16, 32))
    for some, every in zip(few, all_of_it, strict=True):
        assert some.num_tokens == 128
        assert some.index.tolist() == every.index[: len(some.index)].tolist()


def test_a_mixture_is_measured_by_weight(checkpoint, tmp_path, capsys):
    """Of any number of its first sequences too, which traces are made of."""
    pretrained = load_pretrained(checkpoint)
    for name, letter in (("a", "a"), ("b", "b"), ("c", "c")):
        (tmp_path / f"{name}.txt").write_text(letter * 9000)
        part = "" if name == "c" else f"validation_files: '{tmp_path}/{name}.txt'\n"
        (tmp_path / f"train-{name}.txt").write_text(f"train {letter}" * 9)
        (tmp_path / f"{name}.yaml").write_text(
            f"source: files\nfiles: '{tmp_path}/train-{name}.txt'\n{part}"
        )
    for first, second in (("a", "b"), ("b", "a")):
        weights = {f"{tmp_path}/{first}.yaml": 1, f"{tmp_path}/{second}.yaml": 3}
        weights[f"{tmp_path}/c.yaml"] = 4  # without held-out text
        data = pretrained.recipe.data.model_copy(update={"corpus": weights})
        corpora = held_out_corpora(pretrained.recipe.model_copy(update={"data": data}), None)
        assert "no held-out text: corpus c" in capsys.readouterr().err
        statistics, _, ids_BT = analyze(pretrained, corpora, 12 * 32, 3, trace_tokens=4 * 32)
        assert statistics["corpus"] == f"{first} 0.25, {second} 0.75"
        assert statistics["tokens"] == 12 * 32
        assert sorted(set(ids_BT.flatten().tolist())) == [97, 98]
        assert (ids_BT == ord(first)).all(1).sum() == 1
        batches = held_out_tokens(pretrained, corpora, 12 * 32, 3)
        letters = torch.cat(list(batches))[:, 0].tolist()
        assert letters.count(ord(second)) == 9


def test_the_command_reads_files(checkpoint, tmp_path, cli_here):
    (tmp_path / "text.jsonl").write_text(json.dumps({"text": "a neuron fires " * 40}) + "\n")
    command = ["analyze", str(checkpoint), "--tokens", "256", "--out", str(tmp_path / "out")]
    assert "256 tokens" in cli_here(*command, "--data", tmp_path / "*.jsonl").stdout


def test_files_have_their_text_where_the_recipes_have_it(tiny, tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps({"content": "one", "text": "no"}) + "\n")
    (tmp_path / "b.txt").write_text("two|three")
    files = [str(tmp_path / name) for name in ("a.jsonl", "b.txt")]
    (tmp_path / "c.yaml").write_text(
        f"source: files\nfiles: {files}\ntext_field: content\ndocument_separator: '|'\n"
    )
    for keys in (
        [f"data.corpus={tmp_path / 'c.yaml'}"],
        [f"data.files={files}", "data.text_field=content", "data.document_separator='|'"],
    ):
        [corpus] = held_out_corpora(tiny(*keys), files)
        assert list(texts_in_order(corpus.validation)) == ["one", "two", "three"]
    (tmp_path / "c.yaml").unlink()
    [corpus] = held_out_corpora(tiny(f"data.corpus={tmp_path / 'c.yaml'}"), files)
    assert list(texts_in_order(corpus.validation)) == ["no", "two|three"]


def test_without_held_out_text_the_remedy_is_an_option_of_the_command(tiny, tmp_path):
    text = tmp_path / "text.jsonl"
    text.touch()
    recipe = tiny(f"data.files=[{text}]", "data.validation_fraction=0")
    with pytest.raises(ValueError, match=r"corpus local has no held-out text; name .* --data GLOB"):
        held_out_corpora(recipe, None)
    text.unlink()
    with pytest.raises(ValueError, match=r"cannot be read .*does not exist.* name .* --data GLOB"):
        held_out_corpora(recipe, None)


def test_text_that_cannot_be_measured_on_is_named_with_the_commands_option(
    checkpoint, tmp_path, error_of
):
    (tmp_path / "short.txt").write_text("hi")
    for pattern, message in (
        ("none*", "error: --data: ['{}'] match no file; give others with --data GLOB"),
        ("none.txt", "error: --data: {} does not exist; correct the path, or leave it out"),
        (
            "$NOT_SET",
            "NOT_SET' names an environment variable that is not set; set it, or give glob",
        ),
        ("short.txt", "local is shorter than one sequence of 32 tokens; name more text: --data GL"),
    ):
        path = tmp_path / pattern
        for command in (["analyze", checkpoint], ["export", checkpoint, "out", "--drop-dead"]):
            stderr = error_of(*command, "--data", path)
            assert message.format(path) in stderr
            assert "data." not in stderr


def test_trace_files_are_checked(tmp_path):
    trace = _trace(np.eye(8, dtype=bool))
    path = tmp_path / "traces.npz"
    save_traces(path, [trace])
    [restored], _ = load_traces(path, 8)
    assert restored.index.tolist() == list(range(8))
    with pytest.raises(ValueError, match=r"names neuron 7 of 4"):
        load_traces(path, 4)
    with pytest.raises(FileNotFoundError, match=r"sparsellm analyze"):
        load_traces(tmp_path / "none.npz", 8)
    np.savez(path, something=np.zeros(3))
    with pytest.raises(ValueError, match=r"is not a trace file"):
        load_traces(path, 8)
    path.write_text("text")
    with pytest.raises(ValueError, match=r"is damaged, or not a NumPy file"):
        load_traces(path, 8)


def test_a_trace_file_may_have_the_ids_of_its_tokens(tmp_path):
    trace, ids_BT = _trace(np.eye(8, dtype=bool)), np.arange(8).reshape(2, 4)
    path = tmp_path / "traces.npz"
    save_traces(path, [trace], ids_BT)
    [restored], ids = load_traces(path, 8)
    assert restored.index.tolist() == list(range(8))
    assert np.array_equal(ids, ids_BT)
    save_traces(path, [trace])
    assert load_traces(path, 8)[1] is None
    for wrong in (ids_BT.reshape(-1), ids_BT[:1]):
        save_traces(path, [trace], wrong)
        with pytest.raises(ValueError, match=r"ids .* are not \(sequences, context_.* of 8 tokens"):
            load_traces(path, 8)
