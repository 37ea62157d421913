"""Every kernel compiles, with the options that the GPU's owner will use; needs no GPU."""

import functools
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from ffn.kernels import nvrtc
from sparsellm.ffn import token_order, types
from sparsellm.ffn.activations import RECTIFIED
from sparsellm.ffn.formats import TWELL_WIDTH
from sparsellm.ffn.kernels.compiler import compile
from sparsellm.ffn.kernels.compiler.gpu_architecture import ARCHITECTURES, GPUArchitecture
from sparsellm.ffn.kernels.launch import Layout, kernels_of
from sparsellm.paths import bundled

pathfinder = pytest.importorskip("cuda.pathfinder", reason="CuPy is not installed")
# Whichever test comes first compiles the kernels that others use: minutes where cores are busy.
pytestmark = pytest.mark.timeout(900)
KERNELS = compile.sources()
SOURCES = sorted(set(KERNELS.values()))
# What there is since Ampere, and the shared memory in KiB that a block of threads can have there.
SHARED_KIB = {"sm_80": 163, "sm_86": 99, "sm_89": 99, "sm_90a": 227, "sm_100": 227, "sm_120": 99}
OLDEST, NEWEST = "12.4", "13"
WITHOUT_FP8 = {"sm_80", "sm_86"}  # which users are told
BEFORE_BLACKWELL = ("sm_80", "sm_86", "sm_89", "sm_90a")
TARGETS = {
    **dict.fromkeys((OLDEST, "12.6"), BEFORE_BLACKWELL),
    **dict.fromkeys(("12.8", "12.9", NEWEST), tuple(SHARED_KIB)),
}
BF16, FP16 = torch.bfloat16, torch.float16
OTHERS = [name for name in RECTIFIED if name != "relu"]
# `make test` compiles every kernel with the oldest compiler for the oldest target, and with the
# newest for Hopper and both generations of Blackwell. It also compiles `REPRESENTATIVE` with the
# compilers between, with the newest for the oldest target, in fp16, and for other activations.
QUICK = [
    (OLDEST, "sm_80", BF16),
    *((NEWEST, target, BF16) for target in ("sm_90a", "sm_100", "sm_120")),
]
# What `make test-long` compiles: every kernel, for every target that a compiler knows.
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
ACTIVATION_HEADER = bundled("cuda") / "common" / "activation.cuh"
# A few words that change from work unit to work unit may be kept in local memory.
FRAME_BYTES = 32
# Where a compiler keeps more of them: its kernel is right, and slower than another one's.
KNOWN_FRAMES = {("12.9", "sm_100", "weight_grad"): 104}
# Asynchronous copies and matrix products of both architectures, a cluster, atomics, scans.
REPRESENTATIVE = frozenset({"gate_twell", "pack_union", "union_up", "sort_tokens", "decode_down"})
# What runs at inference, in either type.
INFERENCE = {
    *("decode_gate", "decode_down", "relu_product"),
    *("decode_linear", "decode_linear_wide", "decode_attention", "residual_norm"),
    "rotate_prompts",
    *("gate_union", "union_up", "union_down", "gate_twell", "twell_up", "twell_down"),
    "dense_rows",
    *("pack_union", "pack_twell", "quantise_rows"),
}


def fp8_options(target: str) -> tuple[bool, ...]:
    """Whether kernels are compiled for FP8: without, and with it where the target has it."""
    return (False,) if target in WITHOUT_FP8 else (False, True)


def architectures_of(target: str) -> list[GPUArchitecture]:
    """Whose kernels a GPU can run, the best first."""
    digits = target.partition("_")[2].rstrip("a")
    capability = (int(digits[:-1]), int(digits[-1]))
    return [a for a in ARCHITECTURES if a.runs_on(capability)]


def is_of(source: Path, architecture: GPUArchitecture) -> bool:
    """Kernels of common/ run everywhere, others on the GPUs of the architecture of their folder."""
    return source.parent.name in {"common", architecture.folder}


def library(version: str) -> Path:
    if version == NEWEST:
        installed = Path(pathfinder.load_nvidia_dynamic_lib("nvrtc").abs_path)
        if not installed.name.endswith(f".{NEWEST}"):
            pytest.skip(f"{installed} is not of CUDA {NEWEST}")
        return installed
    path = nvrtc.library(version)
    if path is None:
        pytest.skip(f"NVRTC {version} is not there: `make test` fetches it")
    return path


def job(source: Path, folder: str, target: str, *variant: object, fp8: bool) -> nvrtc.Job:
    """With the options that `sparsellm.ffn.kernels.compiler.compile` passes."""
    options = compile.compile_options(source, folder, target, SHARED_KIB[target], *variant, fp8=fp8)
    return nvrtc.Job(source.stem, source.read_text(encoding="utf-8"), options)


def compile_kernels(  # noqa: PLR0917
    cache: Path,
    version: str,
    target: str,
    element: torch.dtype = BF16,
    activation: str = "relu",
    architecture: GPUArchitecture | None = None,
    *,
    fp8: bool = False,
    stems: frozenset[str] | None = None,
) -> dict[str, Path]:
    """Compiles an architecture's kernels, by default the best, for a target: files by kernel.

    For an activation other than ReLU, and for FP8, those whose source depends on it; with
    ``stems``, those of these files.
    """
    architecture = architecture or architectures_of(target)[0]
    folder = architecture.folder
    kernels = {
        kernel: source
        for kernel, source in KERNELS.items()
        if is_of(source, architecture)
        and (stems is None or source.stem in stems)
        and (element == BF16 or kernel in INFERENCE)
        and (activation == "relu" or ACTIVATION_HEADER in compile.included(source, folder))
        and (not fp8 or _has_fp8(source, folder))
    }
    used = sorted(set(kernels.values()))
    jobs = [job(source, folder, target, element, activation, fp8=fp8) for source in used]
    files = nvrtc.compile_all(library(version), jobs, cache)
    return {kernel: files[source.stem] for kernel, source in kernels.items()}


def _has_fp8(source: Path, folder: str) -> bool:
    files = {source, *compile.included(source, folder)}
    return any("SPARSELLM_E4M3" in file.read_text(encoding="utf-8") for file in files)


@pytest.fixture
def compiled(cubins):
    """`compile_kernels`."""
    return functools.partial(compile_kernels, cubins)


@pytest.mark.parametrize("version", TARGETS)
def test_every_target_that_a_compiler_knows_is_compiled(version):
    assert nvrtc.compiler(library(version)).version.startswith(version)
    capabilities = nvrtc.compiler(library(version)).capabilities
    assert {t for t in SHARED_KIB if int(re.sub(r"\D", "", t)) in capabilities} == set(
        TARGETS[version]
    )
    assert {target for v, target, _ in EVERY if v == version} == set(TARGETS[version])


@pytest.mark.parametrize(("version", "target", "element"), COMPILATIONS, ids=str)
def test_compiles_within_what_a_multiprocessor_has(compiled, version, target, element):
    for architecture in architectures_of(target):
        for fp8 in fp8_options(target):
            kernels = compiled(version, target, element, architecture=architecture, fp8=fp8)
            _check_usage(kernels, version, target)


@pytest.mark.long
@pytest.mark.parametrize("activation", OTHERS)
@pytest.mark.parametrize(
    ("target", "element"),
    [
        *(("sm_90a", BF16), ("sm_90a", FP16)),  # of both architectures
        *((target, BF16) for target in ("sm_80", "sm_100", "sm_120")),
    ],
    ids=str,
)
def test_kernels_of_every_activation_compile(compiled, activation, target, element):
    for architecture in architectures_of(target):
        for fp8 in fp8_options(target):
            kernels = compiled(NEWEST, target, element, activation, architecture, fp8=fp8)
            _check_usage(kernels, NEWEST, target)


@pytest.mark.parametrize(
    ("version", "target"),
    [
        *(("12.6", "sm_90a"), ("12.8", "sm_90a"), ("12.8", "sm_120"), ("12.9", "sm_100")),
        (NEWEST, "sm_80"),
    ],
)
def test_representative_kernels_compile_with_every_version(compiled, version, target):
    for architecture in architectures_of(target):
        kernels = compiled(version, target, architecture=architecture, stems=REPRESENTATIVE)
        _check_usage(kernels, version, target)


@pytest.mark.parametrize(
    ("target", "element", "activation", "fp8"),
    [
        ("sm_90a", FP16, "relu", True),
        *((target, FP16, "relu", False) for target in ("sm_90a", "sm_120")),
        *((target, BF16, name, False) for target in ("sm_90a", "sm_120") for name in OTHERS),
    ],
    ids=str,
)
def test_representative_kernels_compile_in_every_form(compiled, target, element, activation, fp8):
    kernels = compiled(NEWEST, target, element, activation, fp8=fp8, stems=REPRESENTATIVE)
    _check_usage(kernels, NEWEST, target)


def _check_usage(kernels: dict[str, Path], version: str, target: str) -> None:
    assert kernels
    for kernel, path in kernels.items():
        usage = nvrtc.usage_of(path.read_bytes(), kernel)
        frame_bytes = KNOWN_FRAMES.get((version, target, kernel), FRAME_BYTES)
        assert usage.frame_bytes <= frame_bytes, f"{kernel} for {target} keeps registers in memory"
        assert usage.registers <= 255
        # The KiB that CUDA keeps for itself is in the file from Hopper on, and not in the limit.
        reserved = 0 if target in {"sm_80", "sm_86", "sm_89"} else 1024
        shared = usage.static_bytes - reserved + usage.dynamic_bytes
        assert shared <= SHARED_KIB[target] * 1024, f"{kernel} for {target}: {usage}"


@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=lambda a: a.name)
def test_launches_know_every_kernels_threads_and_parameters(compiled, architecture):
    for kernel, path in compiled(NEWEST, "sm_90a", architecture=architecture).items():
        signature = nvrtc.signature_of(path.read_bytes(), kernel)
        assert signature.max_threads > 0, kernel
        parameters = kernels_of(KERNELS[kernel].read_text(encoding="utf-8"))[kernel]
        layout = Layout(kernel, parameters)
        assert tuple(layout.sizes) == signature.parameter_bytes, kernel


def _ptx(compiled) -> list[tuple[str, str]]:
    """Of all kernels, for Hopper: instructions before the machine's own scheduling of them."""
    return [
        (kernel, path.with_suffix(".ptx").read_text(encoding="utf-8"))
        for architecture in ARCHITECTURES
        for fp8 in (False, True)
        for kernel, path in compiled(NEWEST, "sm_90a", architecture=architecture, fp8=fp8).items()
    ]


def test_no_kernel_takes_what_the_one_before_writes_for_constant(compiled):
    """Launches overlap, and PTX wants ld.global.nc's data constant for the whole kernel."""
    for kernel, ptx in _ptx(compiled):
        assert "ld.global.nc" not in ptx, kernel


def test_warps_arrive_whole_at_a_cluster_barrier(compiled):
    arrivals = 0
    for kernel, ptx in _ptx(compiled):
        lines = (re.sub(r"//.*|\$\w+:", "", line).strip() for line in ptx.splitlines())
        instructions = [line for line in lines if line]
        for at, instruction in enumerate(instructions):
            if instruction.startswith("barrier.cluster.arrive"):
                arrivals += 1
                assert instructions[at - 1].startswith("bar.warp.sync"), kernel
    assert arrivals > 0


def test_a_changed_header_changes_the_options(tmp_path, monkeypatch):
    copy = shutil.copytree(bundled("cuda"), tmp_path / "cuda")
    monkeypatch.setattr(compile, "bundled", lambda folder: copy)
    copies = sorted(copy.glob("*/*.cu"))
    before = {source: compile.compile_options(source, "sm90", "sm_90a", 227) for source in copies}
    header = copy / "common" / "ptx.cuh"  # included by every kernel, by some through other headers
    header.write_text(header.read_text() + "// changed\n")
    assert before
    for source in copies:
        assert compile.compile_options(source, "sm90", "sm_90a", 227) != before[source]


def test_the_digest_covers_every_header():
    headers = set(bundled("cuda").rglob("*.cuh"))
    included = (
        compile.included(source, a.folder)
        for a in ARCHITECTURES
        for source in SOURCES
        if is_of(source, a)
    )
    assert set().union(*included) == headers


def test_the_mark_for_no_entry_is_none():
    """At N = 65,536 every tile may be full: an entry is a slot and a neuron, both of one tile."""
    header = (bundled("cuda") / "common" / "union.cuh").read_text(encoding="utf-8")
    [mark] = re.findall(r"\bno_entry = (0x[0-9a-f]+)u;", header)
    tile = np.arange(256, dtype=np.uint32)[:, None, None] << 8
    place = np.arange(256, dtype=np.uint32)
    entries = (tile | place[:, None]) << 16 | tile | place
    assert not (entries == int(mark, 16)).any()


def test_every_kernel_waits_for_the_one_before(compiled):
    """Launches overlap: a kernel that does not wait reads what is not written yet."""
    for kernel, ptx in _ptx(compiled):
        _, _, entry = ptx.partition(f".entry {kernel}(")
        body, _, _ = entry.partition("\n}\n")
        assert "griddepcontrol.wait" in body, kernel


def test_python_and_device_code_agree_on_the_formats(cubins):
    expected = {
        "block_tokens": types.BLOCK_TOKENS,
        "tile_neurons": types.TILE_NEURONS,
        "twell_width": TWELL_WIDTH,
        "control_words": types.CONTROL_WORDS,
        "max_neurons": types.MAX_NEURONS,
        "max_blocks * block_tokens": types.MAX_TOKENS,
        "max_ell_width": types.MAX_ELL_WIDTH,
        "dense_row_tile": types.DENSE_ROW_TILE,
        "max_decode_tokens": types.MAX_DECODE_TOKENS,
    }
    header = bundled("cuda") / "common" / "tiles.cuh"
    lines = [header.read_text(encoding="utf-8")]
    for number, value in enumerate(expected):
        lines.append(f'extern "C" __device__ const uint32 exported_{number} = {value};')
    options = compile.compile_options(header, "sm90", "sm_90a", SHARED_KIB["sm_90a"])
    constants = nvrtc.Job("constants", "\n".join(lines), options)
    cubin = nvrtc.compile_all(library(NEWEST), [constants], cubins)["constants"].read_bytes()
    exported = {name: nvrtc.exported(cubin, str(i)) for i, name in enumerate(expected)}
    assert exported == expected


def test_the_key_of_a_token_has_the_same_bits_in_python(compiled):
    cubin = compiled(NEWEST, "sm_90a")["make_keys"].read_bytes()
    for name, bits in (("id", token_order._ID_BITS), ("frequency", token_order._FREQUENCY_BITS)):
        assert nvrtc.exported(cubin, f"{name}_bits") == bits
