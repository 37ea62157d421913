"""TwELL and the hybrid format in plain torch, against plain loops and gradients in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsellm.ffn.formats import pack_twell, twell_overflows, unpack_twell

densities = st.sampled_from([0.0, 0.01, 0.1, 0.5, 1.0])


def _activations(m: int, n: int, density: float, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(m, n, generator=generator).abs() + 0.01
    fires = torch.rand(m, n, generator=generator) < density
    return torch.where(fires, values, 0).bfloat16()


@settings(max_examples=40, deadline=None)
@given(
    shape=st.tuples(st.integers(0, 5), st.integers(1, 600)),
    compression=st.sampled_from([2, 4, 8]),
    density=densities,
    seed=st.integers(0, 10**6),
)
def test_twell_holds_each_rows_non_zeros_tile_by_tile(shape, compression, density, seed):
    (m, n), gate = shape, _activations(*shape, density, seed)
    word = pack_twell(gate, compression)
    width, tiles = 256 // compression, -(-n // 256)
    assert word.shape == (m, tiles, width)
    assert word.dtype == torch.int32
    for row in range(m):
        for tile in range(tiles):
            own = gate[row, 256 * tile : 256 * (tile + 1)]
            neurons = own.nonzero().flatten().tolist()
            found = [w & 0xFFFFFFFF for w in word[row, tile].tolist()]
            assert found[0] == len(neurons)
            kept = neurons[: width - 1]
            assert [w & 0xFFFF for w in found[1 : len(kept) + 1]] == [256 * tile + i for i in kept]
            bits = own[kept].view(torch.int16).int() & 0xFFFF
            assert [w >> 16 for w in found[1 : len(kept) + 1]] == bits.tolist()
    values, count = unpack_twell(word, n)
    overflows = twell_overflows(word)
    assert overflows.tolist() == [bool((row >= width).any()) for row in count]
    assert torch.equal(values[~overflows], gate[~overflows])
    assert int(count.sum()) == int((gate != 0).sum())


def test_twell_has_the_papers_sizes_and_refuses_others():
    assert pack_twell(torch.zeros(3, 5632), 8).shape == (3, 22, 32)  # M × N / 8 words
    last = torch.zeros(1, 65_536)
    last[0, -1] = -1.5
    assert torch.equal(unpack_twell(pack_twell(last, 2), 65_536)[0], last.bfloat16())
    with pytest.raises(ValueError, match="compression 3 must be one of"):
        pack_twell(torch.zeros(1, 8), 3)
    with pytest.raises(ValueError, match="65,544 neurons"):
        pack_twell(torch.zeros(1, 65_544), 8)
