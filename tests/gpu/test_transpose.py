"""The transpose of weights: the same bits as PyTorch's, at every tail and type."""

import random

import pytest
import torch

from gpu.conditions import asked_of, named, need_kernels, poisoned
from sparsellm.ffn.kernels import transpose
from sparsellm.ffn.kernels.transpose import mirror_strip, transposed

pytestmark = pytest.mark.gpu
BF16, FP32 = torch.bfloat16, torch.float32
TYPES = [(BF16, BF16), (FP32, BF16), (FP32, FP32)]
SHAPES = [(8, 8), (64, 64), (72, 136), (2048, 5632), (5632, 2048), (8, 65536), (65536, 8)]


@pytest.fixture(autouse=True)
def kernel():
    """What is launched; memory is poisoned."""
    need_kernels()
    with asked_of(transpose) as launched, poisoned():
        yield launched


def _matrix(rows, columns, dtype):
    """Random; some values are not finite, some on the border between two of bf16."""
    generator = torch.Generator("cuda").manual_seed(rows + columns)
    matrix = torch.randn(rows, columns, device="cuda", generator=generator)
    kind = torch.randint(40, matrix.shape, device="cuda", generator=generator)
    for number, value in enumerate((float("inf"), -0.0, 1e-45, 1 + 2.0**-8, 3.4e38)):
        matrix[kind == number] = value
    return matrix.to(dtype)


def _fuzz(count):
    draw = random.Random(0)
    return [(8 * draw.randint(1, 100), 8 * draw.randint(1, 100)) for _ in range(count)]


@pytest.mark.parametrize(("dtype", "to_dtype"), TYPES, ids=str)
def test_equals_pytorch_to_the_bit(dtype, to_dtype, kernel):
    for shape in [*SHAPES, *_fuzz(12)]:
        with named(shape):
            matrix = _matrix(*shape, dtype)
            kernel.clear()
            actual, expected = transposed(matrix, to_dtype), matrix.t().to(to_dtype).contiguous()
            assert kernel == ["transpose"]
            assert actual.is_contiguous()
            assert actual.dtype == to_dtype
            bits = torch.int16 if to_dtype == BF16 else torch.int32
            assert torch.equal(actual.view(bits), expected.view(bits))


@pytest.mark.parametrize("size", [8, 64, 136, 2048])
def test_strips_of_matrices_are_mirrored(size, kernel):
    for start, end in ((0, size // 16 * 8), (size // 32 * 8, size - 8), (0, 8)):
        with named(start, end):
            matrices = torch.stack([_matrix(size, size, BF16) for _ in range(3)])
            expected = matrices.clone()
            expected[:, end:, start:end] = matrices[:, start:end, end:].mT
            kernel.clear()
            mirror_strip(matrices, start, end)
            assert kernel == ["mirror_strip"]
            assert torch.equal(matrices.view(torch.int16), expected.view(torch.int16))


def test_pytorch_mirrors_other_types(kernel):
    for dtype in (FP32, torch.float64):
        matrices = torch.randn(2, 16, 16, device="cuda", dtype=dtype)
        mirror_strip(matrices, 0, 8)
        assert torch.equal(matrices[:, 8:, :8], matrices[:, :8, 8:].mT)
    assert kernel == []


def test_pytorch_takes_what_the_kernel_does_not(kernel):
    matrices = {
        "strided": _matrix(64, 128, FP32)[:, ::2],
        "not aligned to 16 bytes": _matrix(64, 64, BF16).flatten()[4:516].view(8, 64),
        "odd": _matrix(12, 64, BF16),
        "float16": _matrix(64, 64, torch.float16),
        "empty": _matrix(64, 64, BF16)[:0],
    }
    for name, matrix in matrices.items():
        with named(name):
            assert torch.equal(transposed(matrix, BF16), matrix.t().to(BF16))
            assert kernel == []
