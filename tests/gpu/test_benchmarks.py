"""`sparsellm bench ffn` and ``ffn-train`` on CUDA, at a small size: events, graphs, memory."""

import importlib.util

import pytest

from sparsellm.bench import ffn_forward, ffn_train
from sparsellm.cli import make_parser

pytestmark = pytest.mark.gpu

SMALL = ["--shape", "512/1408", "--pattern", "uniform", "--nnz", "16", "--seconds", "2"]


def run(module, name, *words):
    measurements = list(module.measure(make_parser().parse_args(["bench", name, *SMALL, *words])))
    assert measurements  # else the case was skipped, and why was printed
    return [{m.metric: m for m in each} for each in measurements]


def check_times(measurements):
    ms = measurements["ms"]
    assert 0 < ms.sustained["p10"] <= ms.value <= ms.sustained["p90"]
    assert 0 < ms.baseline_sustained["p10"] <= ms.baseline <= ms.baseline_sustained["p90"]
    assert ms.ratio == pytest.approx(ms.baseline / ms.value)
    if importlib.util.find_spec("pynvml"):
        assert 200 < ms.sustained["sm_mhz"] < 4000
        assert 30 < ms.sustained["watts"] < 1500
        millijoules = ms.sustained["watts"] * ms.value / ms.case["M"]
        assert measurements["mJ_per_token"].value == pytest.approx(millijoules)


@pytest.mark.parametrize("tokens", [2048, 8])
def test_a_forward_is_timed_eagerly_and_few_tokens_as_a_graph(tokens):
    [measurements] = run(ffn_forward, "ffn", "--M", str(tokens), "--kernels", "sparse")
    check_times(measurements)
    assert measurements["difference"].value < 0.02
    case = measurements["ms"].case
    assert case.get("launch") == ("graph" if tokens == 8 else None)
    assert case["path"] == "sparse"


def stages_add_up(measurements):
    stages = measurements["forward_ms"].value + measurements["backward_ms"].value
    return 0.5 < stages / measurements["ms"].value < 2


def test_training_has_stages_and_memory():
    for _ in range(3):  # other tests share the GPU, so stages and whole may differ tenfold
        formats = run(ffn_train, "ffn-train", "--M", "2048", "--format", "union", "twell")
        if all(stages_add_up(measurements) for measurements in formats):
            break
    assert len(formats) == 2
    for measurements in formats:
        check_times(measurements)
        assert stages_add_up(measurements)
        assert 0 < measurements["memory_MiB"].value < measurements["peak_MiB"].value
        assert measurements["difference"].value < 0.03


def test_training_as_graphs_has_the_times_of_the_kernels_alone():
    eager, graph = (
        run(ffn_train, "ffn-train", "--M", "2048", *words)[0] for words in ([], ["--graph"])
    )
    check_times(graph)
    assert graph["ms"].case["launch"] == "graph"
    assert graph["ms"].value < 1.1 * eager["ms"].value
    assert graph["difference"].value < 0.03
