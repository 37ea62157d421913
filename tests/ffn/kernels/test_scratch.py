"""Arrays that share an allocation."""

import itertools

import pytest
import torch

from sparsellm.ffn.kernels.launch import Address
from sparsellm.ffn.kernels.scratch import Array, Scratch, ScratchLayout

ARRAYS = {
    "a": Array((3, 5)),
    "none": Array((0, 7)),
    "b": Array((129,), torch.uint8),
    "c": Array((2, 3, 4), torch.bfloat16),
    "d": Array((1,), torch.int64),
}


def test_every_array_has_memory_of_its_own_where_its_address_says():
    scratch = Scratch(ScratchLayout(ARRAYS), torch.device("cpu"))
    tensors = [scratch.tensor(name) for name in ARRAYS]
    for value, (tensor, array) in enumerate(zip(tensors, ARRAYS.values(), strict=True)):
        assert (tensor.shape, tensor.dtype) == array
        tensor.fill_(value)
    for value, tensor in enumerate(tensors):
        assert (tensor == value).all()
    named = scratch(*ARRAYS)
    assert list(named) == list(ARRAYS)
    addresses = list(named.values())
    assert all(type(address) is Address for address in addresses)
    for address, tensor in zip(addresses, tensors, strict=True):
        assert not tensor.numel() or address == tensor.data_ptr()
    assert all((b - a) % 512 == 0 for a, b in itertools.pairwise(addresses))
    assert scratch("c", "a") == {"c": addresses[3], "a": addresses[0]}
    assert scratch["c"] == addresses[3]
    assert type(scratch["c"]) is Address


def test_zeroed():
    scratch = Scratch(ScratchLayout(ARRAYS), torch.device("cpu"), torch.zeros)
    assert not any(scratch.tensor(name).any() for name in ARRAYS)


def test_a_name_that_is_not_there():
    with pytest.raises(KeyError, match="e"):
        Scratch(ScratchLayout(ARRAYS), torch.device("cpu"))("e")
