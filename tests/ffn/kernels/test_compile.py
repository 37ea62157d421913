"""Every kernel compiles, with the options that the GPU's owner will use; needs no GPU."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from ffn.kernels import nvrtc
from sparsellm.ffn.kernels import compile
from sparsellm.ffn.kernels.gpu_architecture import ARCHITECTURES, Source, target_of
from sparsellm.ffn.kernels.launch import Layout
from sparsellm.ffn.kernels.signature import parameters_of
from sparsellm.paths import bundled

pathfinder = pytest.importorskip("cuda.pathfinder", reason="CuPy is not installed")
STEMS = list(compile.sources())
# What there is since Ampere, and the shared memory in KiB that a block of threads can have there.
SHARED_KIB = {"sm_80": 163, "sm_86": 99, "sm_89": 99, "sm_90a": 227, "sm_100": 227, "sm_120": 99}
OLDEST, NEWEST = "12.4", "13"
BEFORE_BLACKWELL = ("sm_80", "sm_86", "sm_89", "sm_90a")
TARGETS = {
    **dict.fromkeys((OLDEST, "12.6"), BEFORE_BLACKWELL),
    **dict.fromkeys(("12.8", "12.9", NEWEST), tuple(SHARED_KIB)),
}
BF16, FP16 = torch.bfloat16, torch.float16
# What `make test` compiles. A compiler that rejects a source mostly rejects it for every target, so
# one target is enough for each, and PTX for all but the newest.
QUICK = [
    (OLDEST, "compute_80", BF16),
    ("12.6", "compute_90a", BF16),
    ("12.8", "compute_120", BF16),
    ("12.9", "compute_100", BF16),
    *((NEWEST, target, BF16) for target in ("sm_80", "sm_90a", "sm_100", "sm_120")),
    (NEWEST, "sm_90a", FP16),
]
# What `make test-long` compiles: machine code for every target that a compiler knows.
EVERY = [
    (version, target, element)
    for version, targets in TARGETS.items()
    for element in ((BF16, FP16) if version in {OLDEST, NEWEST} else (BF16,))
    for target in targets
]
COMPILATIONS = [
    *QUICK,
    *(pytest.param(*job, marks=pytest.mark.long) for job in EVERY if job not in QUICK),
]
# A few words that change from work unit to work unit may be kept in local memory.
FRAME_BYTES = 32
# Where a compiler keeps more of them: its kernel is right, and slower than another one's.
KNOWN_FRAMES = {("12.9", "sm_100", "portable_weight_grad"): 104}
# What an FFN runs at inference, in either type.
INFERENCE = {
    *("decode_gate", "decode_down", "relu_product", "permute_rows"),
    *("gate_union", "union_up", "union_down", "gate_twell", "twell_ffn", "dense_rows"),
    *("pack_union", "pack_twell", "portable_up", "portable_down"),
}


def _runs_on(stem: str, target: str) -> bool:
    """A kernel of common/ everywhere, others on the GPUs of the architecture with their folder."""
    folder = compile.source_path(stem).parent.name
    digits = target.partition("_")[2].rstrip("a")
    capability = (int(digits[:-1]), int(digits[-1]))
    return folder == "common" or any(
        a.folder == folder and a.runs_on(capability) for a in ARCHITECTURES
    )


def _library(version: str) -> Path:
    if version == NEWEST:
        installed = Path(pathfinder.load_nvidia_dynamic_lib("nvrtc").abs_path)
        if not installed.name.endswith(f".{NEWEST}"):
            pytest.skip(f"{installed} is not of CUDA {NEWEST}")
        return installed
    path = nvrtc.library(version)
    if path is None:
        pytest.skip(f"NVRTC {version} is not there: `make test` fetches it")
    return path


def _job(stem: str, target: str, element: torch.dtype) -> nvrtc.Job:
    source = compile.source_path(stem).read_text(encoding="utf-8")
    shared_kib = SHARED_KIB[target.replace("compute_", "sm_")]
    options = compile.compile_options(stem, target, shared_kib, element)
    # CuPy adds -ftz=true.
    return nvrtc.Job(stem, target, source, (*options, "-ftz=true"))


@pytest.fixture
def compiled(request):
    """Compiles all kernels under a version of NVRTC: machine code by stem, as files."""

    def compile_under(version: str, target: str, element: torch.dtype = BF16):
        stems = STEMS if element == BF16 else sorted(INFERENCE)
        jobs = [_job(stem, target, element) for stem in stems if _runs_on(stem, target)]
        cache = Path(request.config.cache.mkdir("cubins"))
        return nvrtc.compile_all(_library(version), jobs, cache)

    return compile_under


@pytest.mark.parametrize("version", TARGETS)
def test_every_target_that_a_compiler_knows_is_compiled(version):
    known = nvrtc.targets_of(_library(version))
    assert {t for t in SHARED_KIB if int(re.sub(r"\D", "", t)) in known} == set(TARGETS[version])
    assert {target for v, target, _ in EVERY if v == version} == set(TARGETS[version])


@pytest.mark.timeout(900)  # ten seconds to thirty, where the cores are free
@pytest.mark.parametrize(("version", "target", "element"), COMPILATIONS, ids=str)
def test_compiles_within_what_a_multiprocessor_has(compiled, version, target, element):
    kernels = compiled(version, target, element)
    assert kernels
    if target.startswith("compute_"):
        return
    for stem, path in kernels.items():
        usage = nvrtc.usage_of(path.read_bytes(), stem)
        frame_bytes = KNOWN_FRAMES.get((version, target, stem), FRAME_BYTES)
        assert usage.frame_bytes <= frame_bytes, f"{stem} for {target} keeps registers in memory"
        assert usage.registers <= 255
        # The KiB that CUDA keeps for itself is in the file from Hopper on, and not in the limit.
        reserved = 0 if target in {"sm_80", "sm_86", "sm_89"} else 1024
        shared = usage.static_bytes - reserved + usage.dynamic_bytes
        assert shared <= SHARED_KIB[target] * 1024, f"{stem} for {target}: {usage}"


@pytest.mark.parametrize("target", ["sm_80", "sm_90a"])
def test_launches_know_every_kernels_threads_and_parameters(compiled, target):
    for stem, path in compiled(NEWEST, target).items():
        signature = nvrtc.signature_of(path.read_bytes(), stem)
        assert signature.threads == signature.max_threads > 0, f"{stem} for {target}"
        parameters = parameters_of(stem, compile.source_path(stem).read_text(encoding="utf-8"))
        layout = Layout(stem, parameters)
        assert tuple(layout.sizes) == signature.parameter_bytes, f"{stem} for {target}"


@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=lambda a: a.name)
def test_every_kernel_that_an_architecture_names_runs_there(architecture):
    capabilities = [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)]
    named = [value for value in vars(architecture).values() if isinstance(value, Source)]
    assert len(named) >= 7
    for capability in filter(architecture.runs_on, capabilities):
        for source in named:
            assert _runs_on(source.stem, target_of(capability)), source.stem


def _ptx(compiled) -> dict[str, str]:
    """Of all kernels, for Hopper: instructions before the machine's own scheduling of them."""
    paths = compiled(NEWEST, "sm_90a")
    return {stem: Path(f"{path}.ptx").read_text() for stem, path in paths.items()}


def test_no_kernel_takes_what_the_one_before_writes_for_constant(compiled):
    """Launches overlap, and PTX wants ld.global.nc's data constant for the whole kernel."""
    for stem, ptx in _ptx(compiled).items():
        assert "ld.global.nc" not in ptx, stem


def test_warps_arrive_whole_at_a_cluster_barrier(compiled):
    arrivals = 0
    for stem, ptx in _ptx(compiled).items():
        lines = (re.sub(r"//.*|\$\w+:", "", line).strip() for line in ptx.splitlines())
        instructions = [line for line in lines if line]
        for at, instruction in enumerate(instructions):
            if instruction.startswith("barrier.cluster.arrive"):
                arrivals += 1
                assert instructions[at - 1].startswith("bar.warp.sync"), stem
    assert arrivals > 0


def test_a_changed_header_changes_the_options(tmp_path, monkeypatch):
    copy = shutil.copytree(bundled("cuda"), tmp_path / "cuda")
    monkeypatch.setattr(compile, "bundled", lambda folder: copy)
    monkeypatch.setattr(compile, "source_path", lambda stem: compile.sources()[stem])
    before = {stem: compile.compile_options(stem, "sm_90a", 227) for stem in STEMS}
    header = copy / "common" / "ptx.cuh"  # included by every kernel, by some through other headers
    header.write_text(header.read_text() + "// changed\n")
    for stem in STEMS:
        assert compile.compile_options(stem, "sm_90a", 227) != before[stem]


def test_an_architecture_names_no_kernel_of_inference_that_is_not_compiled_in_fp16():
    for architecture in ARCHITECTURES:
        parts = ("gate", "gate_twell", "up", "down")
        assert {getattr(architecture, part).stem for part in parts} <= INFERENCE


def test_the_digest_covers_every_header():
    headers = set(bundled("cuda").rglob("*.cuh"))
    assert set().union(*(compile._included(compile.source_path(stem)) for stem in STEMS)) == headers


def test_the_mark_for_no_entry_is_none():
    """At N = 65,536 every tile may be full: an entry is a slot and a neuron, both of one tile."""
    header = (bundled("cuda") / "common" / "union.cuh").read_text(encoding="utf-8")
    [mark] = re.findall(r"\bno_entry = (0x[0-9a-f]+)u;", header)
    tile = np.arange(256, dtype=np.uint32)[:, None, None] << 8
    place = np.arange(256, dtype=np.uint32)
    entries = (tile | place[:, None]) << 16 | tile | place
    assert not (entries == int(mark, 16)).any()


@pytest.mark.parametrize("stem", STEMS)
def test_waits_for_the_kernel_before(stem):
    """Launches overlap: a kernel that does not wait reads what is not written yet."""
    path = compile.source_path(stem)
    texts = [path.read_text(), *(h.read_text() for h in compile._included(path))]
    assert any("await_previous_kernel();\n" in text for text in texts)
