"""The ramp of the activation and the teacher on a GPU: compiled, in bf16, on the sparse kernels."""

import pytest
from conftest import TINY

from gpu.conditions import need_kernels
from sparsellm.processes.signals import StopRequest
from sparsellm.recipe import load_recipe
from sparsellm.runs.telemetry.records import read_metrics
from sparsellm.training.loop import train

pytestmark = pytest.mark.gpu

WIDE = ["model.hidden_size=64", "model.intermediate_size=256", "model.context_length=64"]
SHORT = ["train.global_batch_tokens=512", "train.micro_batch_size=2", "train.steps=6"]
FAST = ["runtime.precision=bf16", "runtime.compile=true", "validation.every_steps=0"]


def _trained(folder, *overrides, init_from=None):
    common = [*TINY, *WIDE, *SHORT, *FAST, f"logging.run_dir={folder}"]
    recipe = load_recipe("debug", [*common, *overrides])
    with StopRequest() as stop:
        train(recipe, stop, init_from=init_from)
    records = read_metrics(recipe.run_path, "train")
    return recipe.run_path, records


def test_a_compiled_ramp_begins_with_silu_and_ends_on_the_kernels(tmp_path):
    need_kernels()
    silu = ["ffn.activation=silu", "sparsity.l1_coefficient=0"]
    dense, _ = _trained(tmp_path, "name=dense", *silu)
    _, continued = _trained(tmp_path, "name=continued", *silu, init_from=dense)
    ramp = ["ffn.ramp_steps=4", "ffn.kernels=sparse", "train.distillation=0.5"]
    _, records = _trained(tmp_path, "name=sparse", *ramp, init_from=dense)
    paths = [line["kernels"]["sparse"][0] for line in records]
    assert paths == [False] * 4 + [True] * 2
    # The first step is SiLU alone.
    assert records[0]["loss"] == pytest.approx(continued[0]["loss"], abs=0.01)
    assert all(line["grad_norm"] > 0 for line in records)
