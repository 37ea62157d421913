"""Ranks that fail under NCCL: one message, by whoever has it, and all processes end in seconds."""

import subprocess
import sys
import time

import pytest
import torch
from conftest import ROOT, process_env, set_arguments
from processes.test_peers import FAULTY
from rank_processes import processes_with

from sparsellm.recipe import load_recipe
from sparsellm.runs.telemetry.records import METRICS_FILE

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]

MESSAGES = {
    "raise": "error (rank 1): RuntimeError: injected fault",
    "data": "error (rank 1): shard 7 is missing; restore it",
    "kill": "ended without a word (killed, or out of memory?)",
    "sleep": "Ranks wait for one another for runtime.timeout_minutes 2",
    "freeze": "gave no sign of life for 12 s",
}


@pytest.mark.parametrize("config", ["ddp8.yaml", "fsdp2.yaml"])
@pytest.mark.parametrize("kind", MESSAGES)
def test_all_ranks_end_with_one_message(tiny_overrides, tmp_path, monkeypatch, kind, config):
    monkeypatch.setenv("SPARSELLM_TEST_PATIENCE", "12")
    overrides = [*tiny_overrides, "train.steps=1000000", "train.micro_batch_size=1"]
    overrides += [
        "checkpoint.every_steps=1000000",
        "validation.every_steps=0",
        "runtime.compile=false",
    ]
    overrides += ["runtime.timeout_minutes=2", "logging.every_steps=1"]
    arguments = ["train", "--recipe", "debug", *set_arguments(overrides)]
    command = [sys.executable, "-m", "accelerate.commands.launch", "--main_process_port=0"]
    command += [f"--config_file={ROOT / 'launch' / config}", "--num_processes=2"]
    command += [str(FAULTY), kind, "1", "3", *arguments]
    failed = subprocess.run(
        command, capture_output=True, text=True, check=False, env=process_env(), timeout=240
    )
    end_time, last = time.time(), _last_record(overrides)
    assert failed.returncode == 1, failed.stderr[-3000:]
    # After the last step: 12 s of patience where a rank stalls, and what torchrun gives a frozen
    # process to end by itself, which is 30 s.
    assert end_time - last < (60 if kind == "freeze" else 30), end_time - last
    stderr, _, _ = failed.stderr.partition("torch/distributed/elastic")
    if kind == "kill":  # torchrun may see it first, and say so itself
        assert stderr.count("error") <= 1, stderr
    else:
        assert stderr.count(MESSAGES[kind]) == 1, stderr
        assert stderr.count("error:") + stderr.count("error (rank") == 1, stderr
    assert stderr.count("Traceback") == (kind == "raise"), stderr
    assert not processes_with(f"logging.run_dir={tmp_path / 'runs'}")


def _last_record(overrides) -> float:
    run_path = load_recipe("debug", overrides).run_path
    return (run_path / METRICS_FILE).stat().st_mtime
