"""Casts and zeros of many tensors at once."""

import torch

from sparsellm.ffn.step_shared import Fills


def test_casts_and_zeros_are_there_at_the_end():
    generator = torch.Generator().manual_seed(0)
    sources = [torch.randn(shape, generator=generator) for shape in ((3, 5), (0, 4), (7,))]
    sources.append(sources[0].t())
    fills = Fills()
    casts = [fills.cast(source, torch.bfloat16) for source in sources]
    zeros = [fills.zeros_like(source) for source in sources]
    zeros.append(fills.zeros_like(casts[0], torch.float64))
    fills.fill()
    for source, cast, zero in zip(sources, casts, zeros, strict=False):
        assert torch.equal(cast, source.bfloat16())
        assert cast.is_contiguous()
        assert torch.equal(zero, torch.zeros_like(source))
    assert (zeros[-1].dtype, zeros[-1].abs().sum()) == (torch.float64, 0)


def test_what_needs_no_cast_is_the_same_memory_without_a_graph():
    weight = torch.nn.Parameter(torch.randn(4, 4))
    fills = Fills()
    same = fills.cast(weight, torch.float32)
    other = fills.cast(weight.t(), torch.float32)
    fills.fill()
    assert same.data_ptr() == weight.data_ptr()
    assert not same.requires_grad
    assert other.is_contiguous()
    assert torch.equal(other, weight.t())
