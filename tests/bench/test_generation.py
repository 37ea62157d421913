"""`bench generation`: its figures, and gates that fit the asked number of neurons."""

import pytest
import torch
import transformers

from sparsellm.bench import generation
from sparsellm.ffn.inference_path.accelerate import accelerate, restore
from sparsellm.recipe import load_recipe

from . import conftest
from .conftest import CPU

WORDS = ["--recipe", "debug", "--precision", "model"]
WORDS += ["--nnz", "20", "--batch", "2", "--prompt", "32"]


def options(*words):
    return conftest.options("generation", *WORDS, "--new-tokens", "24", "--repeats", "2", *words)


@pytest.fixture(autouse=True)
def without_kernels(monkeypatch):
    """Ours then computes as stock does: what is tested is how configurations are compared."""
    monkeypatch.setattr(generation, "accelerate_whole", lambda *_, **__: None)
    monkeypatch.setattr(generation, "_STATIC", {})  # a compiled static cache takes a minute


def test_every_case_has_the_rates_of_all_sides(capsys):
    [figures] = generation.measure(options(), CPU)
    by_baseline = {(figure.case.get("baseline"), figure.metric): figure for figure in figures}
    for baseline in ("static", "eager"):
        rate = by_baseline[baseline, "tokens_per_second"]
        assert rate.value > 0
        assert rate.ratio == pytest.approx(rate.value / rate.baseline)
        assert by_baseline[baseline, "first_token_ms"].value > 0
    assert by_baseline[None, "difference"].value < 0.02
    assert figures[0].case["measured_nnz"] == pytest.approx(20, rel=0.2)


def test_wrong_logits_are_not_timed(monkeypatch):
    same_weights = generation._same_weights

    def spoilt(stock):
        model = same_weights(stock)
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.flip(1))
        return model

    monkeypatch.setattr(generation, "_same_weights", spoilt)
    with pytest.raises(ValueError, match=r"the logits differ from dense by .*%; wrong results"):
        list(generation.measure(options(), CPU))


def test_a_static_cache_is_as_long_as_the_call_needs(monkeypatch):
    """Also after longer prompts, whose length transformers remembers."""
    lengths = []
    create = transformers.StaticCache.__init__

    def init(self, *arguments, max_cache_len, **further):
        lengths.append(max_cache_len)
        create(self, *arguments, max_cache_len=max_cache_len, **further)

    monkeypatch.setattr(transformers.StaticCache, "__init__", init)
    monkeypatch.setattr(generation, "_STATIC", {"cache_implementation": "static"})
    few = ("--new-tokens", "4", "--repeats", "1")
    list(generation.measure(options("--prompt", "32", "16", *few), CPU))
    assert (max(lengths), lengths[-1]) == (32 + 4, 16 + 4)


def test_memory_is_counted_as_if_each_side_were_alone():
    timings = {
        name: {"throughputs": [1.0], "first": [1.0], "peak": 100.0 * 2**20}
        for name in ("ours", "static", "eager")
    }
    records = generation._records({}, timings, (30 * 2**20, 10 * 2**20))
    peaks = [record for record in records if record.metric == "peak_MiB"]
    assert [(peak.value, peak.baseline) for peak in peaks] == [(90, 70), (90, 70)]


@torch.no_grad()
def test_the_sides_share_all_weights_but_w_down():
    recipe = load_recipe("debug")
    stock = generation._stock_model(recipe, CPU)
    ours = generation._same_weights(stock)
    before = generation._unshared(ours, stock, CPU)
    accelerate(ours)
    shape = recipe.model
    down = shape.num_hidden_layers * shape.hidden_size * shape.intermediate_size
    assert generation._unshared(ours, stock, CPU) - before == 2 * down
    assert generation._unshared(stock, ours, CPU) - before == 2 * down
    restore(ours)


def test_gates_fire_as_asked():
    recipe = load_recipe("debug")
    with torch.no_grad():
        stock = generation._stock_model(recipe, CPU)
        ids = generation._ids(recipe, 4, 256, CPU)
        assert generation.fit_gates(stock, 12, ids) == pytest.approx(12, rel=0.2)
