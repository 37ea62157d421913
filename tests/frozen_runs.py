"""Small runs in every way a step can take, to the last bit: for changes that must alter no number.

``python tests/frozen_runs.py FOLDER [CASE …] [--as OTHER]`` trains the cases with the code on
PYTHONPATH and writes FOLDER/CASE.json: every record of metrics.jsonl without times, and a digest of
every tensor of the last checkpoint. With ``--as`` it compares them with those of an earlier call,
such as one with the code of another commit, and fails where they differ.
"""

import argparse
import hashlib
import json
import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from conftest import ROOT, TINY, process_env, set_arguments
from safetensors import safe_open

from sparsellm.cli import main as sparsellm
from sparsellm.data.loader import TokenLoader
from sparsellm.recipe import load_recipe
from sparsellm.runs import checkpoint
from sparsellm.runs.telemetry.records import read_metrics

# What a record says of the machine, not of the training.
TIMES = {"tokens_per_second", "step_ms", "seconds", "train_seconds", "compile_seconds"}
TIMES |= {"memory_gib", "mfu", "mfu_dense"}
VERSIONS = {"sparsellm", "torch"}


@dataclass(frozen=True)
class Case:
    """A run.

    Args:
        overrides: of the debug recipe, beside `TINY`.
        config: of launch/; one process or two.
        fault: what the last rank does with a micro-batch: ``nan``, ``damage`` or ``kill``.
        at: the number of that micro-batch, 1 is the first. ``kill`` waits for the checkpoint
            before it.
    """

    overrides: str
    config: str = "single"
    fault: str = ""
    at: int = 0


RESUMED = "train.steps=12 checkpoint.every_steps=4 validation.every_steps=6"
SKIP = "train.on_nonfinite=skip"
SPIKES = "train.spike_threshold=3 optimizer.learning_rate=1e-2 optimizer.schedule=constant"
TARGET = "sparsity.target_nnz=10 sparsity.target_per_layer=true sparsity.l1_coefficient=0.01"
MUON = "optimizer.name=muon optimizer.gate_learning_rate=2e-3 ffn.kernels=sparse"
FUSED = "runtime.weight_gradients=fused runtime.activation_checkpointing=true"
CASES = {
    "dense-target": Case(f"{RESUMED} {TARGET}"),
    "sparse-killed": Case(f"{RESUMED} ffn.kernels=sparse", fault="kill", at=30),
    "twell-skipped": Case(
        f"{RESUMED} {SKIP} ffn.kernels=sparse ffn.format=twell ffn.ell_width=16", fault="nan", at=14
    ),
    "plain-fused": Case(
        f"{RESUMED} {FUSED} ffn.gated=false runtime.precision=bf16 logging.every_steps=5"
    ),
    "reinit": Case(f"{RESUMED} ffn.gated=false ffn.kernels=sparse sparsity.reinit_rate=0.1"),
    "muon-killed": Case(f"{RESUMED} {TARGET} {MUON}", fault="kill", at=30),
    "spike": Case(
        f"{SPIKES} train.steps=60 checkpoint.every_steps=30 ffn.kernels=sparse",
        fault="damage",
        at=4 * 55 - 1,
    ),
    "auto-size": Case(
        "train.steps=8 train.micro_batch_size=auto ffn.kernels=sparse checkpoint.every_steps=0"
    ),
    "two-target-skipped": Case(
        f"{RESUMED} {SKIP} {TARGET} train.micro_batch_size=1", "ddp8", fault="nan", at=14
    ),
    "two-sparse-killed": Case(
        f"{RESUMED} ffn.kernels=sparse ffn.gated=false train.micro_batch_size=1",
        "ddp8",
        fault="kill",
        at=30,
    ),
    "shards-sparse": Case(f"{RESUMED} ffn.kernels=sparse runtime.precision=bf16", "fsdp2"),
    "shards-skipped": Case(f"{RESUMED} {SKIP} {TARGET}", "fsdp2", fault="nan", at=14),
}


def arrange_fault(fault: str, at: int, checkpoints: Path) -> None:
    """Has this process meet a fault with the micro-batch ``at``."""
    read, cross_entropy = TokenLoader.__next__, F.cross_entropy
    count, spoilt = 0, False

    def next_batch(loader: TokenLoader) -> torch.Tensor:
        nonlocal count, spoilt
        tokens_BT1, count = read(loader), count + 1
        if count == at and fault == "kill":
            while checkpoint.latest(checkpoints) is None:
                time.sleep(0.05)
            os.kill(os.getpid(), signal.SIGKILL)
        spoilt = count == at and fault == "nan"
        return torch.full_like(tokens_BT1, 255) if (count, fault) == (at, "damage") else tokens_BT1

    def loss(*arguments, **options):
        value = cross_entropy(*arguments, **options)
        return value * math.nan if spoilt and torch.is_grad_enabled() else value

    TokenLoader.__next__ = next_batch
    F.cross_entropy = loss


def train(name: str, case: Case, overrides: list[str], fault: str) -> None:
    """Trains the run; with the fault ``kill`` it must die."""
    words = [str(Path(__file__).resolve()), "--rank", fault, str(case.at)]
    words += ["train", "--recipe", "debug", *set_arguments(overrides)]
    if case.config == "fsdp2":
        words.insert(0, str(ROOT / "tests" / "training" / "fsdp_on_cpu.py"))
    command = [sys.executable, *words]
    if case.config != "single":
        config = ROOT / "launch" / f"{case.config}.yaml"
        launch = ["-m", "accelerate.commands.launch", "--main_process_port=0", "--num_processes=2"]
        command = [sys.executable, *launch, f"--config_file={config}", *words]
    paths = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    env = process_env(PYTHONPATH=paths)
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    if (done.returncode == 0) == (fault == "kill"):
        raise SystemExit(f"{name}: status {done.returncode}\n{done.stdout}\n{done.stderr}")


def outcome(overrides: list[str]) -> dict:
    """What the run has left behind, without times and versions."""
    run_path = load_recipe("debug", overrides).run_path
    records = [
        {key: value for key, value in record.items() if key not in TIMES}
        for record in read_metrics(run_path)
        if not record["kind"].startswith("session")
    ]
    last, tensors, state = checkpoint.latest(run_path / "checkpoints"), {}, {}
    # Without the random state of each rank, which has bytes that nothing sets.
    for path in sorted(last.glob("[mos]*.safetensors")) if last else ():
        with safe_open(path, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118
                value = file.get_tensor(key).contiguous()
                digest = hashlib.sha256(value.flatten().view(torch.uint8).numpy()).hexdigest()
                tensors[f"{path.name}: {key}"] = f"{value.dtype} {list(value.shape)} {digest}"
    if last:
        trainer = json.loads((last / "trainer.json").read_text())
        state = {key: value for key, value in trainer.items() if key not in VERSIONS}
        state |= {path.name: json.loads(path.read_text()) for path in last.glob("rank_*.json")}
    return {"records": records, "tensors": tensors, "trainer": state}


def differences(actual: dict, expected: dict) -> list[str]:
    """The first records, tensors and values that are not the same."""
    lines = [
        f"{len(a)} {key}, not {len(b)}"
        for key in actual
        if len(a := actual[key]) != len(b := expected[key])
    ]
    for record, other in zip(actual["records"], expected["records"], strict=False):
        lines += [
            f"step {other['step']} {key}: {record.get(key)}, not {other.get(key)}"
            for key in record.keys() | other.keys()
            if record.get(key) != other.get(key)
        ]
    for kind in ("tensors", "trainer"):
        keys = sorted(actual[kind].keys() | expected[kind].keys())
        lines += [key for key in keys if actual[kind].get(key) != expected[kind].get(key)]
    return lines[:5]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("cases", nargs="*", default=list(CASES))
    parser.add_argument("--as", dest="other", type=Path)
    options = parser.parse_args()
    failed = False
    for name in options.cases:
        case, folder = CASES[name], options.folder.resolve()
        overrides = [
            *TINY,
            *case.overrides.split(),
            f"name={name}",
            f"logging.run_dir={folder}/runs",
        ]
        subprocess.run(["rm", "-rf", str(folder / "runs" / name)], check=True)
        train(name, case, overrides, case.fault)
        if case.fault == "kill":
            train(name, case, overrides, "none")
        actual = json.loads(json.dumps(outcome(overrides)))
        (folder / f"{name}.json").write_text(json.dumps(actual, indent=1))
        if options.other is not None:
            expected = json.loads((options.other / f"{name}.json").read_text())
            wrong = differences(actual, expected)
            failed |= bool(wrong)
            print(name, "differs: " + "; ".join(wrong) if wrong else "is the same", flush=True)
    sys.exit(failed)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        fault, at, *arguments = sys.argv[2:]
        if os.environ.get("RANK", "0") == str(int(os.environ.get("WORLD_SIZE", "1")) - 1):
            words = [word for word in arguments if word != "--set"]
            path = load_recipe("debug", words[3:]).run_path
            arrange_fault(fault, int(at), path / "checkpoints")
        torch.set_num_threads(1)
        sys.exit(sparsellm(arguments))
    main()
