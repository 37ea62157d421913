"""Every launch passes what its kernel takes, without a GPU: the driver is replaced, and no more."""

import functools
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from gpu import sanitized

from ffn.kernels import nvrtc
from ffn.kernels.test_compile import (
    ACTIVATION_HEADER,
    BF16,
    NEWEST,
    OTHERS,
    SOURCES,
    compile_kernels,
    is_of,
    job,
    library,
)
from sparsellm.decoding import token_kernels
from sparsellm.decoding.kv_cache import LayerCache, Positions
from sparsellm.decoding.token_math import Heads
from sparsellm.ffn.fp8 import quantised_rows
from sparsellm.ffn.kernels import (
    hybrid,
    inference,
    launch,
    linear,
    quantise,
    sort_tokens,
    transpose,
    union_training,
)
from sparsellm.ffn.kernels.compiler import compile
from sparsellm.ffn.kernels.compiler.gpu_architecture import ARCHITECTURES
from sparsellm.ffn.kernels.compiler.nvrtc import NVRTC
from sparsellm.ffn.kernels.launch import kernels_of
from sparsellm.ffn.types import (
    BLOCK_TOKENS,
    BackwardInputs,
    FFNWeights,
    Linear,
    MatrixGradients,
    Room,
)
from sparsellm.training.optimization import muon_passes

LAUNCHING = ("sparsellm.ffn.kernels.", "sparsellm.decoding.", "sparsellm.training.optimization.")
M, K, N = 2048, 64, 1024  # as many tokens and neurons as heavy blocks and long groups need


@pytest.fixture
def everywhere(monkeypatch):
    """Replaces a name in all modules that launch."""

    def replace(name, value):
        for path, module in list(sys.modules.items()):
            if path.startswith(LAUNCHING) and hasattr(module, name):
                monkeypatch.setattr(module, name, value)

    return replace


@pytest.fixture
def launched(everywhere, architecture, cubins, monkeypatch):
    """The kernels that were launched, and their activations; what they compute is undefined."""
    kernels = []
    compiled = compile_kernels(cubins, NEWEST, "sm_90a", architecture=architecture)

    @functools.cache
    def load(kernel, folder, device_index, element, activation, fp8):  # noqa: PLR0917
        source = compile.sources()[kernel].read_text(encoding="utf-8")
        cubin = compiled[kernel].read_bytes()
        return launch.Kernel(
            function=SimpleNamespace(ptr=(kernel, activation)),
            layout=launch.Layout(kernel, kernels_of(source)[kernel]),
            threads=nvrtc.signature_of(cubin, kernel).max_threads,
            shared_bytes=0,
            exported=lambda name: nvrtc.exported(cubin, name),
            device_index=device_index,
            num_multiprocessors=132,
            may_overlap=True,
        )

    def record(config, function, pointers, extra):
        kernels.append(function)
        return 0

    everywhere("load", load)
    everywhere("_launcher", lambda: record)
    everywhere("_enter_context", lambda: None)
    everywhere("tensor_map", lambda *shape: bytes(128))
    everywhere("_is_taken", lambda matrix, dtype: True)
    everywhere("_kernels_take", lambda tensors: True)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: 0, raising=False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    return kernels


def _matrix(*shape):
    return torch.zeros(shape, dtype=torch.bfloat16)


def _weights(gated, biased):
    b_gate, b_up, b_down = (_matrix(N), _matrix(N), _matrix(K)) if biased else (None,) * 3
    gate = _matrix(N, K) if gated else None
    return FFNWeights(
        gate, _matrix(N, K), _matrix(K, N), b_gate if gated else None, b_up, b_down, 0.0
    )


@pytest.fixture(params=ARCHITECTURES, ids=lambda a: a.name)
def architecture(request, everywhere):
    everywhere("architecture_of", lambda device_index: request.param)
    return request.param


def _launch_all(gated, biased, ordered, dtype, added, *, fp8=False, activation="relu"):
    x_MK, w = _matrix(M, K), _weights(gated, biased)
    w = w._replace(activation=activation, down_NK=_matrix(N, K))
    quantise.quantise_rows(x_MK, out=quantise.quantise_rows(x_MK))
    if fp8:
        w = w._replace(quantised=quantised_rows(w.first[0]))
    token_M = torch.arange(M, dtype=torch.int32) if ordered else None
    for format in ("union", "twell"):
        inference.sparse(x_MK, w, 0, token_M, format)
        inference.sparse(x_MK[:8], w, 0, None, format)
    inference.dense_ffn(x_MK, w)
    if w.quantised is not None:
        for num_tokens in (M, 8):
            inference.sparse(x_MK[:num_tokens], w.in_fp8(w.quantised))
    sort_tokens.sort_tokens(torch.arange(M), 128, 16, 512)
    d_l1 = torch.ones(())
    out = MatrixGradients.empty(w, dtype)
    w = w._replace(b_gate_N=None, b_up_N=None, b_down_K=None)
    capacity = M // BLOCK_TOKENS * N
    _, _, saved = union_training.forward(x_MK, w, Room(capacity), token_M)
    inputs = BackwardInputs(x_MK, d_l1, x_MK, w, saved, token_M)
    union_training.backward(inputs, out, adds=added)
    _, _, saved = hybrid.forward(x_MK, w, Room(M // 8, 128), token_M)
    hybrid.backward(inputs._replace(saved=saved), out, adds=added)
    transpose.transposed(out.down_NK, dtype)
    transpose.mirror_strip(_matrix(3, 64, 64), 0, 32)
    _launch_muon()
    _launch_decoding(w, biased=biased, fp8=fp8)


def _launch_muon():
    """Of more matrices than a launch takes."""
    matrices = [torch.zeros(7, 9) for _ in range(70)]
    directions, refused = _matrix(70, 7, 9), torch.tensor(False)
    muon_passes.advance_momenta(matrices, matrices, [None, *directions[1:]], 0.95, refused)
    muon_passes.add_updates(matrices, directions, 0.99, -0.1, refused)


def _launch_decoding(w, biased, fp8):
    """A token of each of some sequences, beside the FFNs."""
    heads = Heads(num=4, num_keys=2, size=16, scaling=0.25, rotates=biased)
    cache = LayerCache(_matrix(3, 2, 128, 16), _matrix(3, 2, 128, 16))
    at = Positions(torch.arange(3), torch.zeros(3), 9, (_matrix(128, 16), _matrix(128, 16)))
    token_kernels.attend(_matrix(3, 128), heads, cache, at)
    q, k, v = _matrix(3 * 9, 128).split((64, 32, 32), -1)
    token_kernels.rotate_prompts(q, k, v, 9, heads, cache, at.first_M if biased else None, at)
    for m, num_linears in ((3, 3), (20, 1)):
        x_MK = _matrix(m, K)
        token_kernels.residual_norm(x_MK, x_MK if biased else None, _matrix(K), 1e-5)
        layer = Linear(w.up_NK, _matrix(N) if biased else None, w.quantised if fp8 else None)
        linear.linears(x_MK, (layer,) * num_linears)


@pytest.mark.timeout(900)  # compiles all kernels, if test_compile.py has not
def test_every_launch_passes_what_its_kernel_takes(architecture, launched):
    for gated in (True, False):
        _launch_all(gated, biased=True, ordered=True, dtype=torch.bfloat16, added=False)
        _launch_all(gated, biased=False, ordered=False, dtype=torch.float32, added=True)
        _launch_all(gated, biased=True, ordered=True, dtype=torch.float32, added=True, fp8=True)
    folders = {"common", architecture.folder}
    expected = {k for k, path in compile.sources().items() if path.parent.name in folders}
    assert {kernel for kernel, _ in launched} == expected


@pytest.mark.timeout(900)
def test_what_the_sanitizer_is_shown_launches(architecture, launched, everywhere, monkeypatch):
    """As far as a CPU gets: there operators do not launch, neither training nor token sorting."""
    monkeypatch.setattr(sanitized, "DEVICE", "cpu")
    monkeypatch.setattr(sanitized, "product", torch.nn.functional.linear)  # in a tenth of the time
    everywhere("why_no_kernels", lambda device: None)
    sanitized.run_all(fp8=architecture.makes_gate)
    decoding = {kernel for kernel in compile.sources() if kernel.startswith("decode_")}
    assert decoding | {"residual_norm", "hybrid_grad"} <= {kernel for kernel, _ in launched}


class _FrontEnd(NVRTC):
    """Returns the code that is optimised next, which takes nine tenths of a compilation."""

    def _output(self, program, kind):
        return super()._output(program, "LTOIR" if kind == "CUBIN" else kind)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", OTHERS)
def test_what_an_activation_changes_is_launched_for_it(architecture, launched, name):
    for gated in (True, False):
        for fp8 in (True, False):
            _launch_all(gated, True, True, torch.bfloat16, added=False, fp8=fp8, activation=name)
    source_files = {
        compile.sources()[kernel] for kernel, activation in launched if activation == name
    }
    front_end = _FrontEnd(library(NEWEST))

    def code(source: Path, activation: str) -> bytes:
        compiled = job(source, architecture.folder, "sm_90a", BF16, activation, fp8=False)
        return front_end.compile(compiled.source, source.name, (*compiled.options, "-dlto"))

    changed = {
        source
        for source in SOURCES
        if is_of(source, architecture)
        and ACTIVATION_HEADER in compile.included(source, architecture.folder)
        and code(source, name) != code(source, "relu")
    }
    assert source_files == changed
