"""Every file of launch/ is one that accelerate, or a shell, accepts."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time

import psutil
import pytest
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import launch_command_parser
from conftest import ROOT, process_env, set_arguments

from sparsellm.model import SparseDecoderLayer
from sparsellm.processes.launched import train_command
from sparsellm.runs.records import read_metrics

CONFIGS = sorted((ROOT / "launch").glob("*.yaml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_accelerate_reads_it(path):
    config = load_config_from_file(str(path))
    processes = {"single.yaml": 1, "ddp8.yaml": 8, "fsdp2.yaml": 8, "hsdp.yaml": 16}
    assert config.num_processes == processes[path.name]
    assert config.num_machines == (2 if path.name == "hsdp.yaml" else 1)


def test_fsdp2_shards_our_blocks():
    config = yaml.safe_load((ROOT / "launch" / "fsdp2.yaml").read_text())["fsdp_config"]
    assert config["fsdp_version"] == 2
    assert config["fsdp_transformer_layer_cls_to_wrap"] == SparseDecoderLayer.__name__


def test_hsdp_on_one_node_has_a_process_for_every_shard_of_every_replica():
    for gpus, (replicas, shards) in {2: (1, 2), 4: (2, 2), 8: (2, 4)}.items():
        words = train_command("hsdp", gpus, "8b", [], None)
        options = launch_command_parser().parse_args(words[words.index("-m") + 2 :])
        assert options.num_processes == gpus == replicas * shards
        assert int(options.parallelism_config_dp_replicate_size) == replicas
        assert int(options.parallelism_config_dp_shard_size) == shards
        assert options.num_machines == 1
    assert "--num_machines=1" not in train_command("fsdp2", 2, "8b", [], None)


SLURM = {
    "SLURM_JOB_NODELIST": "node1",
    "SLURM_NNODES": "2",
    "SLURM_NODEID": "1",
    "SLURM_SUBMIT_DIR": str(ROOT),
}


def _slurm(tmp_path, *arguments, **extra):
    """Runs the script with stubs of what Slurm and accelerate would do."""
    stubs = {
        "scontrol": "echo node1",
        "srun": '[ "$1" = --overlap ] || { shift; exec "$@"; }',
        "accelerate": 'printf "%s\\n" "$@"',
    }
    for name, body in stubs.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n", encoding="utf-8")
        (tmp_path / name).chmod(0o755)
    environment = os.environ | SLURM | {"PATH": f"{tmp_path}:{os.environ['PATH']}"} | extra
    script = ["bash", str(ROOT / "launch" / "slurm.sh"), *arguments]
    return subprocess.run(script, capture_output=True, text=True, check=False, env=environment)


def test_slurm_script_hands_on_its_arguments(tmp_path):
    own = ["--recipe", "2b", "--set", "data.files=[/a b/*.parquet, $HOME/*]", "--set", "name='n'"]
    result = _slurm(tmp_path, *own)
    assert result.returncode == 0, result.stderr
    launched = result.stdout.splitlines()
    assert launched[-len(own) :] == own
    assert launched[launched.index("--machine_rank") + 1] == "1"
    assert launched[launched.index("--num_processes") + 1] == "16"


@pytest.mark.parametrize("argument", ["--fresh", "--resume", "--resume=runs/2b"])
def test_slurm_script_refuses_what_a_requeued_job_would_do_again(tmp_path, argument):
    result = _slurm(tmp_path, "--recipe", "2b", argument)
    assert result.returncode == 2
    assert f"by {argument}; instead give --set name=NEW" in result.stderr


def test_slurm_script_starts_any_config(tmp_path):
    result = _slurm(tmp_path, "--recipe", "8b", CONFIG="hsdp")
    launched = result.stdout.splitlines()

    def option(name):
        return launched[launched.index(name) + 1]

    assert option("--config_file") == str(ROOT / "launch" / "hsdp.yaml")
    assert option("--rdzv_backend") == "c10d"
    assert option("--max_restarts") == "3"
    # Replicas are nodes, shards the GPUs of one.
    assert option("--parallelism_config_dp_replicate_size") == "2"
    assert option("--parallelism_config_dp_shard_size") == "8"
    assert "--parallelism_config_dp_shard_size" not in _slurm(tmp_path, "--recipe", "2b").stdout
    unknown = _slurm(tmp_path, "--recipe", "2b", CONFIG="nope")
    assert unknown.returncode == 2
    assert "no such file: " in unknown.stderr


# Slurm on one machine: the step runs here, and so does what is run beside it.
PREEMPTED = {
    "scontrol": 'if [ "$1" = show ]; then echo node1; else echo "$*" >> "$LOG"; fi',
    "srun": 'if [ "$1" = --overlap ]; then echo "$*" >> "$LOG"; kill -USR1 "$(cat "$TRAINER")"; '
    'else shift; exec "$@"; fi',
    "accelerate": 'trap \'echo saved >> "$LOG"; exit 0\' USR1; echo $$ > "$TRAINER"; '
    "while :; do sleep 0.1; done",
}


@pytest.mark.parametrize("sent", [signal.SIGUSR1, signal.SIGTERM], ids=["time limit", "preemption"])
def test_slurm_script_saves_and_queues_the_job_again(tmp_path, sent):
    for name, body in PREEMPTED.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n", encoding="utf-8")
        (tmp_path / name).chmod(0o755)
    log, trainer = tmp_path / "log", tmp_path / "trainer"
    own = {"LOG": str(log), "TRAINER": str(trainer), "SLURM_JOB_ID": "17", **SLURM}
    own["PATH"] = f"{tmp_path}:{os.environ['PATH']}"
    command = ["bash", str(ROOT / "launch" / "slurm.sh"), "--recipe", "2b"]
    job = subprocess.Popen(command, env=os.environ | own)
    while not trainer.is_file() or not trainer.read_text():
        assert job.poll() is None
        time.sleep(0.05)
    job.send_signal(sent)  # Slurm's, to the script alone (--signal=B:…)
    assert job.wait(timeout=30) == 0
    asked, saved, queued = log.read_text().splitlines()
    # First the trainers of every node are told, then their checkpoint is waited for.
    assert asked.startswith("--overlap --ntasks-per-node=1 pkill -USR1 -f")
    assert saved == "saved"
    assert queued == "requeue 17"
    pattern = asked.rpartition(" -- ")[2]
    assert re.search(pattern, "/usr/bin/python -u -m sparsellm train --recipe 2b")
    assert not re.search(pattern, asked)


# Two nodes on this machine. A launcher that was killed, its ranks with it, comes back once.
SRUN = """
[ "$1" != --overlap ] || exit 0
shift
node() {
  SLURM_NODEID=$1 "${@:2}" &
  echo $! > "$NODES/node$1.pid"
  wait $!
}
(node 0 "$@") & first=$!
( # Both are the host of the rendezvous here: the other one goes first.
  until (exec 3<> "/dev/tcp/localhost/$PORT") 2> /dev/null; do sleep 0.2; done
  node 1 "$@"
  [ $? -ne 137 ] || node 1 "$@"
) & second=$!
wait $first; status=$?
wait $second || status=$?
exit $status
"""


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_node_that_is_killed_and_comes_back_resumes_from_the_last_checkpoint(
    tiny_overrides, tmp_path
):
    stubs = {
        "scontrol": "echo localhost",
        "srun": SRUN,
        "accelerate": f'exec {sys.executable} -m accelerate.commands.launch "${{@:2}}"',
    }
    for name, body in stubs.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n", encoding="utf-8")
        (tmp_path / name).chmod(0o755)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    own = {"PORT": str(port), "GPUS_PER_NODE": "1", "NODES": str(tmp_path)}
    own["PATH"] = f"{tmp_path}:{os.environ['PATH']}"
    overrides = [*tiny_overrides, "train.micro_batch_size=1", "train.steps=120"]
    overrides += ["checkpoint.every_steps=10", "validation.every_steps=0"]
    command = ["bash", str(ROOT / "launch" / "slurm.sh"), "--recipe", "debug"]
    job = subprocess.Popen(
        [*command, *set_arguments(overrides)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=process_env(**SLURM, **own),
    )
    lines, killed = [], False
    for line in job.stdout:
        lines.append(line)
        if line.startswith("step  30/") and not killed:
            killed = True
            launcher = psutil.Process(int((tmp_path / "node1.pid").read_text()))
            for process in [*launcher.children(recursive=True), launcher]:
                process.kill()
    text = "".join(lines)
    assert job.wait() == 0, text[-3000:]
    assert "ended without a word" in text
    assert text.count("resuming from ") == 1
    assert "done: 120 steps" in text
    records = read_metrics(tmp_path / "runs" / "debug")
    assert [r["step"] for r in records if r["kind"] == "train"] == list(range(1, 121))
    ends = [r["how"] for r in records if r["kind"] == "session_end"]
    assert len(ends) == 2
    assert ends[-1] == "finished"
