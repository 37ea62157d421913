"""Dense or sparse: the choice follows what the kernels observed and what both were measured at."""

import copy
import gc
import itertools
import pickle

import pytest

from sparsellm.ffn.dispatch import Costs, Dispatch, by_handle

COSTS = Costs(dense=1.0, fixed=0.4, per_neuron=0.001)  # leaves at 570 neurons, returns at 520


def _calls(dispatch, count: int) -> list[str]:
    return [dispatch.choose(4096, lambda: COSTS) for _ in range(count)]


def _observe(dispatch, num_neurons: int, num_tokens: int = 4096) -> None:
    dispatch.observed[(dispatch.word(num_tokens) - dispatch.observed.data_ptr()) // 4] = num_neurons


def test_sparse_until_it_is_observed_to_lose_then_dense_with_rarer_and_rarer_probes():
    dispatch = Dispatch("auto", pinned=False)
    assert _calls(dispatch, 3) == ["sparse"] * 3
    _observe(dispatch, 569)
    assert _calls(dispatch, 3) == ["sparse"] * 3
    _observe(dispatch, 571)
    paths = _calls(dispatch, 2000)
    probes = [i for i, path in enumerate(paths) if path == "sparse"]
    gaps = [b - a for a, b in itertools.pairwise(probes)]
    assert paths[0] == "dense"
    assert probes[0] == 15
    assert gaps[:5] == [32, 64, 128, 256, 256]
    assert len(probes) / len(paths) < 0.01


def test_hysteresis():
    dispatch = Dispatch("auto", pinned=False)
    _observe(dispatch, 700)
    assert _calls(dispatch, 1) == ["dense"]
    _observe(dispatch, 530)  # not enough to come back
    assert _calls(dispatch, 1) == ["dense"]
    _observe(dispatch, 510)
    assert _calls(dispatch, 2) == ["sparse"] * 2
    _observe(dispatch, 560)  # nor to leave again
    assert _calls(dispatch, 2) == ["sparse"] * 2


def test_magnitudes_of_tokens_are_apart_and_measured_once():
    dispatch, measured = Dispatch("auto", pinned=False), []

    def costs():
        measured.append(1)
        return COSTS

    for num_tokens in (1, 2, 3, 4, 1024, 1025, 2048):
        dispatch.choose(num_tokens, costs)
    assert len(measured) == 5  # 1, 2, 3-4, 1024, 1025-2048
    _observe(dispatch, 5000, num_tokens=1500)
    assert dispatch.choose(1025, costs) == "dense"
    assert dispatch.choose(1024, costs) == "sparse"
    assert dispatch.paths() == {
        1: "sparse",
        2: "sparse",
        4: "sparse",
        1024: "sparse",
        2048: "dense",
    }


def test_a_graph_being_captured_takes_the_path_of_now_and_measures_nothing():
    dispatch = Dispatch("auto", pinned=False)

    def costs():
        raise AssertionError("measured during capture")

    assert dispatch.choose(4096, costs, frozen=True) == "sparse"
    _observe(dispatch, 5000)
    assert _calls(dispatch, 1) == ["dense"]
    assert [dispatch.choose(4096, costs, frozen=True) for _ in range(40)] == ["dense"] * 40


def test_asking_whether_it_stays_dense_counts_as_a_call():
    one, other = Dispatch("auto", pinned=False), Dispatch("auto", pinned=False)
    assert not one.stays_dense(4096)  # never asked, nothing measured
    for dispatch in (one, other):
        dispatch.choose(4096, lambda: COSTS)
        _observe(dispatch, 5000)
        assert _calls(dispatch, 1) == ["dense"]

    def asked() -> str:
        return "dense" if one.stays_dense(4096) else one.choose(4096, lambda: COSTS)

    answers = [asked() for _ in range(100)]
    assert answers == _calls(other, 100)
    assert 0 < answers.count("sparse") < 5
    _observe(one, 10)
    assert not one.stays_dense(4096)
    assert Dispatch("dense", pinned=False).stays_dense(8) is False


def test_fixed_paths_and_errors():
    for path in ("sparse", "dense"):
        dispatch = Dispatch(path, pinned=False)
        _observe(dispatch, 5000)
        assert _calls(dispatch, 40) == [path] * 40
    with pytest.raises(ValueError, match="kernels 'fast' must be one of auto, sparse, dense"):
        Dispatch("fast", pinned=False)


def test_a_handle_lasts_as_long_as_its_dispatch():
    dispatch = Dispatch("auto", pinned=False)
    handle = dispatch.handle
    assert by_handle(handle) is dispatch
    assert by_handle(0) is None
    del dispatch
    gc.collect()
    with pytest.raises(KeyError):
        by_handle(handle)


def test_a_copy_has_its_own_words_and_handle():
    dispatch = Dispatch("sparse", pinned=False)
    _observe(dispatch, 7)
    for other in (copy.deepcopy(dispatch), pickle.loads(pickle.dumps(dispatch))):
        assert other.kernels == "sparse"
        assert other.handle != dispatch.handle
        assert by_handle(other.handle) is other
        assert other.observed.data_ptr() != dispatch.observed.data_ptr()
        assert other.observed.max() == -1
