"""Training on CUDA: the options that only exist there, and several GPUs as one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import ROOT, TINY, process_env, set_arguments
from safetensors.torch import load_file

from gpu.conditions import need_kernels
from sparsellm.model import build_model, prepare_blocks
from sparsellm.recipe import load_recipe
from sparsellm.recipe_sections import RuntimeConfig
from sparsellm.runs.records import read_metrics
from sparsellm.training.objective import Objective, build_loss, total_loss
from sparsellm.training.run import build_run, close_run
from sparsellm.training.step import micro_batch

pytestmark = pytest.mark.gpu
WORKER = ROOT / "tests" / "training" / "gradient_worker.py"
# A block of 64 tokens and half of one in each micro-batch.
UNEVEN = [
    "model.hidden_size=64",
    "model.intermediate_size=256",
    "model.context_length=96",
    "train.global_batch_tokens=768",
    "train.micro_batch_size=1",
]


@pytest.fixture
def sparse_kernels():
    need_kernels()


def _relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize("name", ["torch", "liger"])
@pytest.mark.parametrize("shape", [(512, 256, 1000), (333, 128, 50_304)])
def test_losses_equal_float64(name, shape):
    if name == "liger":
        pytest.importorskip("liger_kernel", reason="sparsellm[liger] is not installed")
    tokens, hidden_size, vocab_size = shape
    x = torch.randn(tokens, hidden_size, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(vocab_size, hidden_size, device="cuda") * 0.02
    targets = torch.randint(vocab_size, (tokens,), device="cuda")
    targets[::7] = -100

    def run(loss, x, w):
        x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
        value = loss(x, w, targets)
        (value / tokens).backward()
        return value.detach(), x.grad, w.grad

    exact = run(build_loss(RuntimeConfig(compile=False)), x.double(), w.double())
    with torch.autocast("cuda", torch.bfloat16):
        found = run(build_loss(RuntimeConfig(loss=name)), x, w)
    for value, expected, tolerance in zip(found, exact, (1e-4, 1e-2, 1e-2), strict=True):
        assert _relative(value, expected) < tolerance


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("kernels", ["dense", "sparse"])
def test_compiled_bf16_is_as_near_to_float64_as_eager_bf16(tiny, checkpointing, kernels, request):
    if kernels == "sparse":
        request.getfixturevalue("sparse_kernels")
    recipe = tiny("model.hidden_size=256", "model.intermediate_size=768", "runtime.precision=bf16")
    tokens = torch.randint(257, (3, 33), device="cuda")

    def gradients(runtime, dtype, kernels="dense"):
        model = build_model(recipe, eos_token_id=256).to("cuda", dtype).train()
        prepare_blocks(model, runtime)
        for layer in model.model.layers:
            layer.mlp.use_kernels(kernels)
        with torch.autocast("cuda", torch.bfloat16, enabled=dtype == torch.float32):
            sums = Objective(model, runtime)(tokens[:, :-1], tokens[:, 1:])
        total_loss(sums, 0.01, tokens[:, 1:].numel(), 1).backward()
        return torch.cat([p.grad.double().flatten() for p in model.parameters()])

    eager = RuntimeConfig(compile=False)
    compiled = RuntimeConfig(compile=True, activation_checkpointing=checkpointing)
    exact = gradients(eager, torch.float64)
    eager_error = _relative(gradients(eager, torch.float32), exact)
    for runtime in (eager, compiled) if kernels == "sparse" else (compiled,):
        found = gradients(runtime, torch.float32, kernels)
        assert _relative(found, exact) < 1.2 * eager_error + 1e-4


def _launch(config: str, num_processes: int, *program: str):
    command = [sys.executable, "-m", "accelerate.commands.launch"]
    command += [f"--config_file={ROOT / 'launch' / config}", f"--num_processes={num_processes}"]
    command += ["--main_process_port=0", *program]
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        env=process_env(),
        cwd=ROOT,
        timeout=240,
    )


def _gradients(config: str, num_processes: int, out: Path, common: list[str], *splits: list[str]):
    """A step for each split, all in one launch: (gradient by parameter, numbers) of each."""
    words = [word for split in splits for word in ("--", *split)]
    result = _launch(config, num_processes, str(WORKER), str(out), *common, *words)
    assert result.returncode == 0, result.stderr[-3000:]
    files = [Path(f"{out}-{index}.safetensors") for index in range(len(splits))]
    return [(load_file(f), json.loads(f.with_suffix(".json").read_text())) for f in files]


@pytest.mark.parametrize("kernels", ["dense", "sparse"])
def test_the_host_runs_ahead_of_the_gpu(tiny_overrides, kernels, request):
    if kernels == "sparse":
        request.getfixturevalue("sparse_kernels")
    size = ["model.context_length=1024", "train.global_batch_tokens=32768"]
    size += ["train.micro_batch_size=16", "model.hidden_size=64"]
    size += ["runtime.precision=bf16", f"ffn.kernels={kernels}"]
    run = build_run(load_recipe("debug", [*tiny_overrides, *size]))
    try:
        for _ in range(2):  # the second time everything is compiled and memory at hand
            torch.cuda.synchronize()
            torch.cuda._sleep(2_000_000_000)  # a second
            busy = torch.cuda.Event()
            busy.record()
            for _ in range(2):
                tokens_BT1 = next(run.loader).to(run.accelerator.device, non_blocking=True)
                assert tokens_BT1.nbytes > 2**16  # what CUDA would copy at once
                micro_batch(run, tokens_BT1, l1_weight=0.1)
            was_ahead = not busy.query()
        assert was_ahead
    finally:
        close_run(run)


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("config", ["ddp8.yaml", "fsdp2.yaml"])
def test_two_gpus_compute_the_gradient_of_one(tiny_overrides, tmp_path, config):
    common = [*tiny_overrides, "sparsity.l1_coefficient=0.5", "optimizer.clip_norm=1e6"]
    common += ["validation.every_steps=0"]
    split = ["train.micro_batch_size=1"]
    [(expected, numbers)] = _gradients("single.yaml", 1, tmp_path / "one", common, split)
    [(found, same)] = _gradients(config, 2, tmp_path / "two", common, split)
    assert same["world_size"] == 2
    assert same["stats"] == numbers["stats"]
    assert same["loss"] == pytest.approx(numbers["loss"], rel=1e-4)
    assert same["l1"] == pytest.approx(numbers["l1"], rel=1e-3)
    for name, value in expected.items():
        assert _relative(found[name], value) < 2e-3, name  # TF32 products


@pytest.fixture(scope="module")
def one_dense_gpu(tmp_path_factory):
    """The gradient in fp32, its numbers, and the overrides that it was computed with."""
    folder = tmp_path_factory.mktemp("one")
    common = [*TINY, *UNEVEN, f"logging.run_dir={folder}", "sparsity.l1_coefficient=0.5"]
    common += ["optimizer.clip_norm=1e6", "validation.every_steps=0"]
    split = ["ffn.kernels=dense", "runtime.precision=fp32"]
    [(gradient, numbers)] = _gradients("single.yaml", 1, folder / "one", common, split)
    return gradient, numbers, common


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("config", ["ddp8.yaml", "fsdp2.yaml"])
def test_sparse_kernels_on_two_gpus_come_as_near_as_dense(
    sparse_kernels, one_dense_gpu, tmp_path, config
):
    exact, numbers, common = one_dense_gpu
    splits = [
        [f"ffn.kernels={kernels}", f"runtime.activation_checkpointing={recomputed}"]
        for kernels, recomputed in (("dense", "false"), ("sparse", "false"), ("sparse", "true"))
    ]
    common = [*common, "runtime.precision=bf16"]
    dense, *sparse = _gradients(config, 2, tmp_path / "two", common, *splits)
    for found, same in sparse:
        assert same["world_size"] == 2
        assert same["loss"] == pytest.approx(numbers["loss"], rel=1e-4)
        assert same["l1"] == pytest.approx(numbers["l1"], rel=1e-3)
        assert same["stats"] == sparse[0][1]["stats"]  # recomputation counts nothing twice
        for name, value in exact.items():
            usual = _relative(dense[0][name], value)
            assert _relative(found[name], value) < 1.25 * usual + 5e-3, name


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kernels", ["dense", "sparse"])
@pytest.mark.parametrize("config", ["single.yaml", "fsdp2.yaml"])
def test_training_resumes_to_the_same_losses(tiny_overrides, config, kernels, request):
    num_processes = 1 if config == "single.yaml" else 2
    if torch.cuda.device_count() < num_processes:
        pytest.skip("needs two CUDA devices")
    overrides = [*tiny_overrides, "runtime.precision=bf16", "runtime.compile=true"]
    overrides += ["sparsity.reinit_rate=0.1", "optimizer.min_lr_ratio=1", "data.num_workers=2"]
    if kernels == "sparse":
        request.getfixturevalue("sparse_kernels")
        overrides += [*UNEVEN, "ffn.kernels=sparse"]
    program = ["-m", "sparsellm", "train", "--recipe", "debug"]

    def losses(name, *steps):
        for count in steps:
            run = set_arguments([*overrides, f"name={name}", f"train.steps={count}"])
            result = _launch(config, num_processes, *program, *run)
            assert result.returncode == 0, result.stderr[-3000:]
        recipe = load_recipe("debug", [*overrides, f"name={name}"])
        records = read_metrics(recipe.run_path)
        return [r["loss"] for r in records if r["kind"] == "train"]

    assert losses("halves", 3, 6) == pytest.approx(losses("straight", 6), rel=1e-3)


@pytest.mark.slow
def test_sparse_kernels_train_to_the_losses_of_dense_ones(sparse_kernels, tiny_overrides):
    """Through the time when half of the neurons fire, and on when little room is left to few."""
    overrides = [*tiny_overrides, *UNEVEN, "model.intermediate_size=2048", "runtime.precision=bf16"]
    overrides += ["train.micro_batch_size=2", "train.steps=48", "sparsity.l1_coefficient=0.03"]
    overrides += ["sparsity.dead_window_tokens=1536", "validation.every_steps=24"]
    overrides += ["checkpoint.every_steps=48"]

    def records(kernels):
        run = [*overrides, f"ffn.kernels={kernels}", f"name={kernels}"]
        program = ["-m", "sparsellm", "train", "--recipe", "debug", *set_arguments(run)]
        result = _launch("single.yaml", 1, *program)
        assert result.returncode == 0, result.stderr[-3000:]
        assert "train by dense products" not in result.stdout
        metrics = read_metrics(load_recipe("debug", run).run_path)
        return [record for record in metrics if "loss" in record]

    dense, sparse, auto = (records(kernels) for kernels in ("dense", "sparse", "auto"))
    trained = [record for record in sparse if record["kind"] == "train"]
    assert all(record["kernels"]["sparse"] == [True, True] for record in trained)
    assert len(trained) == 48
    for found in (sparse, auto):
        for own, usual in zip(found, dense, strict=True):
            early = own["step"] <= 10
            assert own["loss"] == pytest.approx(usual["loss"], rel=1e-3 if early else 1e-2)
            if own["kind"] == "train" and own["step"] <= 8:
                _assert_alike(own, usual, first=own["step"] == 1)


def _assert_alike(own: dict, usual: dict, *, first: bool) -> None:
    """Statistics of a step within rounding; of the first step, whose weights are the same, more."""
    relative = 1e-3 if first else 3e-2
    assert own["grad_norm"] == pytest.approx(usual["grad_norm"], rel=1e-2)
    assert own["l1"] == pytest.approx(usual["l1"], rel=relative)
    for key in ("nnz_mean", "nnz_max", "nnz_p99"):
        # The few largest of 768 tokens differ by more than their mean.
        few = 1 if first or key == "nnz_mean" else 3
        expected = pytest.approx(usual["sparsity"][key], rel=few * relative, abs=3)
        assert own["sparsity"][key] == expected, key
    dead = pytest.approx(usual["sparsity"]["dead_fraction"], abs=0.03)
    assert own["sparsity"]["dead_fraction"] == dead
    union = pytest.approx(usual["kernels"]["union_mean"], rel=relative, abs=3)
    assert own["kernels"]["union_mean"] == union
