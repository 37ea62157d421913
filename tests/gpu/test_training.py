"""Training on CUDA: the options that only exist there, and several GPUs as one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import ROOT, process_env, set_arguments
from safetensors.torch import load_file

from sparsellm.metrics import read_metrics
from sparsellm.model import build_model, prepare_blocks
from sparsellm.objective import Objective, build_loss, total_loss
from sparsellm.recipe import RuntimeConfig, load_recipe

pytestmark = pytest.mark.gpu
WORKER = ROOT / "tests" / "gradient_worker.py"


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
def test_compiled_bf16_is_as_near_to_float64_as_eager_bf16(tiny, checkpointing):
    recipe = tiny("model.hidden_size=256", "model.intermediate_size=768", "runtime.precision=bf16")
    tokens = torch.randint(257, (4, 33), device="cuda")

    def gradients(runtime, dtype):
        model = build_model(recipe, eos_token_id=256).to("cuda", dtype).train()
        prepare_blocks(model, runtime)
        with torch.autocast("cuda", torch.bfloat16, enabled=dtype == torch.float32):
            sums = Objective(model, runtime)(tokens[:, :-1], tokens[:, 1:])
        total_loss(sums, 0.01, tokens[:, 1:].numel(), 1).backward()
        return torch.cat([p.grad.double().flatten() for p in model.parameters()])

    eager = RuntimeConfig(compile=False)
    compiled = RuntimeConfig(compile=True, activation_checkpointing=checkpointing)
    exact = gradients(eager, torch.float64)
    eager_error = _relative(gradients(eager, torch.float32), exact)
    assert _relative(gradients(compiled, torch.float32), exact) < 1.2 * eager_error + 1e-4


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
        timeout=120,
    )


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("config", ["ddp8.yaml", "fsdp2.yaml"])
def test_two_gpus_compute_the_gradient_of_one(tiny_overrides, tmp_path, config):
    common = [*tiny_overrides, "sparsity.l1_coefficient=0.5", "optimizer.clip_norm=1e6"]
    common += ["validation.every_steps=0", "--", "train.micro_batch_size=1"]

    def gradient(name: str, config: str, num_processes: int):
        out = tmp_path / name
        result = _launch(config, num_processes, str(WORKER), str(out), *common)
        assert result.returncode == 0, result.stderr[-3000:]
        file = Path(f"{out}-0.safetensors")
        return load_file(file), json.loads(file.with_suffix(".json").read_text())

    expected, numbers = gradient("one", "single.yaml", 1)
    found, same = gradient("two", config, 2)
    assert same["world_size"] == 2
    assert same["stats"] == numbers["stats"]
    assert same["loss"] == pytest.approx(numbers["loss"], rel=1e-4)
    assert same["l1"] == pytest.approx(numbers["l1"], rel=1e-3)
    for name, value in expected.items():
        assert _relative(found[name], value) < 2e-3, name  # TF32 products


@pytest.mark.slow
@pytest.mark.parametrize("config", ["single.yaml", "fsdp2.yaml"])
def test_training_resumes_to_the_same_losses(tiny_overrides, config):
    num_processes = 1 if config == "single.yaml" else 2
    if torch.cuda.device_count() < num_processes:
        pytest.skip("needs two CUDA devices")
    overrides = [*tiny_overrides, "runtime.precision=bf16", "runtime.compile=true"]
    overrides += ["sparsity.reinit_rate=0.1", "optimizer.min_lr_ratio=1", "data.num_workers=2"]
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
