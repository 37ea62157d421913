"""A model's forward, checkpoint after checkpoint in one process: every block stays compiled."""

import json
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from conftest import checkpoint_of
from torch._dynamo.utils import counters

from sparsellm.bench import model_forward
from sparsellm.data.tokenizer import load_tokenizer

from .conftest import CPU, options


@pytest.fixture
def shallow(tiny):
    """A checkpoint, and its recipe."""
    return trained(tiny("model.num_hidden_layers=2", "train.steps=1", "name=shallow"))


@pytest.fixture
def deep(tiny):
    """A checkpoint of more blocks than `few_variants` allows."""
    return trained(tiny("model.num_hidden_layers=3", "train.steps=1"))


@pytest.fixture
def few_variants(monkeypatch):
    """As if there were more blocks than torch compiles of one function."""
    monkeypatch.setattr("sparsellm.model._COMPILED_VARIANTS", 2)
    with torch._dynamo.config.patch(recompile_limit=2):
        yield


def measure(path, *words):
    parsed = options("forward", str(path), "--seconds", "0.01", *words)
    return list(model_forward.measure(parsed, CPU))


def trained(recipe):
    return checkpoint_of(recipe), recipe


@pytest.mark.parametrize("precision", ["model", "fp8"])
def test_the_model_is_accelerated_in_the_precision_that_is_asked_for(
    shallow, monkeypatch, precision
):
    path, recipe = shallow
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    measurements = measure(path, "--layers", "--precision", precision)
    named = {each[0].case.get("precision", "model") for each in measurements}
    assert named == {precision}
    assert len(measurements) == 1 + recipe.model.num_hidden_layers
    off = {each[0].bench: each for each in measurements}["layer_forward"][-1]
    assert off.metric == "difference"
    assert (off.value > 0) == (precision == "fp8")


@pytest.mark.parametrize("gated", ["true", "false"])
def test_layers_are_compared_with_their_own_activation(tiny, monkeypatch, gated):
    path, recipe = trained(
        tiny("train.steps=1", "ffn.activation=relu2", f"ffn.gated={gated}", "name=squares")
    )
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    of_layers = measure(path, "--layers")[1:]
    assert len(of_layers) == recipe.model.num_hidden_layers
    assert all(layer[-1].value < 0.01 for layer in of_layers)


@pytest.mark.usefixtures("few_variants")
def test_every_block_is_compiled_also_those_of_a_second_checkpoint(deep, shallow, monkeypatch):
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    for path, recipe in (deep, shallow):
        counters.clear()
        [measurements] = measure(path)
        rate, difference, sparse_layers = measurements
        assert rate.metric == "tokens_per_ms"
        assert rate.ratio == pytest.approx(rate.value / rate.baseline)
        assert rate.sustained["p10"] <= rate.value <= rate.sustained["p90"]
        assert (difference.metric, difference.value < 0.02) == ("difference", True)
        assert sparse_layers.metric == "sparse_layers"
        assert counters["frames"]["total"] > recipe.model.num_hidden_layers
        assert counters["frames"]["ok"] == counters["frames"]["total"]


def test_an_automatic_micro_batch_is_as_many_sequences_as_the_ffn_benchmarks_have_tokens(
    tiny, monkeypatch
):
    monkeypatch.setattr(model_forward, "_TOKENS", 100)
    auto = tiny("train.micro_batch_size=auto")
    context = auto.model.context_length
    tokenizer = load_tokenizer(auto.data.tokenizer)
    model = SimpleNamespace(recipe=auto, tokenizer=tokenizer, trained=True)
    assert model_forward.held_out(model, auto).shape == (100 // context, context)
    one = tiny("train.micro_batch_size=1")
    assert model_forward.held_out(model, one).shape == (1, context)


def test_the_coefficient_is_that_of_the_checkpoints_step(tiny, tmp_path):
    lines = [{"kind": "train", "step": step, "l1_coefficient": step / 8} for step in (2, 4, 6)]
    records = tmp_path / "metrics.jsonl"
    records.write_text("".join(json.dumps(line) + "\n" for line in lines))
    path = tmp_path / "checkpoints" / "step_00000005"
    pretrained = SimpleNamespace(recipe=tiny(), trainer={"step": 5})
    assert model_forward.last_l1(path, pretrained) == 0.5
