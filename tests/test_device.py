"""Whether kernels can run on a device, and what is said where they cannot."""

import pytest
import torch

import sparsellm
from sparsellm.device import pick_dtype


@pytest.mark.parametrize("name", ["bf16", "bfloat16", "torch.bfloat16", torch.bfloat16])
def test_a_type_is_given_by_name_or_as_torchs(name):
    assert pick_dtype(name, torch.device("cpu")) == torch.bfloat16


def test_the_usual_type_is_that_of_the_device():
    assert pick_dtype(None, torch.device("cpu")) == torch.float32
    assert pick_dtype(None, torch.device("cuda")) == torch.bfloat16


@pytest.mark.parametrize("wrong", ["bf17", "", "auto", torch.int8, torch.float64])
def test_another_type_is_refused_by_its_name(wrong, tmp_path):
    with pytest.raises(ValueError, match=rf"^dtype {wrong!r}: give one of bf16, .*float32, or"):
        sparsellm.load(tmp_path, "cpu", wrong)


@pytest.mark.parametrize(
    "function", [sparsellm.accelerate, sparsellm.restore, sparsellm.replace_ffns]
)
def test_a_path_in_place_of_a_model_is_refused(function):
    message = rf"sparsellm.{function.__name__} takes a model .*, not str: sparsellm.load\(PATH\)"
    with pytest.raises(ValueError, match=message):
        function("runs/debug")


def test_something_else_in_place_of_a_model_or_path_is_refused():
    with pytest.raises(ValueError, match=r"sparsellm.load takes a path .*, not NoneType"):
        sparsellm.load(None)
    with pytest.raises(ValueError, match=r"SparsityController takes a model .*, not list"):
        sparsellm.SparsityController([], None)
