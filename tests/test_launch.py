"""Every file of launch/ is one that accelerate accepts, and slurm.sh does its work under Slurm."""

import os
import socket
import subprocess
import sys
import time

import pytest
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import launch_command_parser
from conftest import CHILDREN, ROOT, set_arguments
from rank_processes import LAUNCHER, processes_with
from slurm import NODES, missing, running_slurm

from sparsellm.model import SparseDecoderLayer
from sparsellm.processes.launched import train_command
from sparsellm.recipe import load_recipe
from sparsellm.runs.telemetry.records import read_metrics

CONFIGS = sorted((ROOT / "launch").glob("*.yaml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_accelerate_reads_it(path):
    config = load_config_from_file(str(path))
    processes = {"single.yaml": 1, "ddp8.yaml": 8, "fsdp2.yaml": 8, "hsdp.yaml": 16}
    assert config.num_processes == processes[path.name]
    assert config.num_machines == (2 if path.name == "hsdp.yaml" else 1)
    # accelerate does not read it from a file; as an option it needs nodes of one network.
    assert not config.same_network


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


SCRIPT = str(ROOT / "launch" / "slurm.sh")


def _script(*arguments, **extra):
    """Runs the script without Slurm."""
    environment = os.environ | {"SLURM_SUBMIT_DIR": str(ROOT)} | extra
    return subprocess.run(
        ["bash", SCRIPT, *arguments], capture_output=True, text=True, check=False, env=environment
    )


def test_slurm_script_refuses_what_a_requeued_job_would_do_again():
    result = _script("--recipe", "2b", "--fresh")
    assert result.returncode == 2
    assert "by --fresh; instead give --set name=NEW" in result.stderr


def test_slurm_script_refuses_a_config_that_does_not_exist():
    unknown = _script("--recipe", "2b", CONFIG="nope")
    assert unknown.returncode == 2
    assert "no such file: " in unknown.stderr


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    if absent := missing():
        pytest.skip(f"needs Slurm (Debian: slurm-wlm munge); not installed: {', '.join(absent)}")
    with running_slurm(tmp_path_factory.mktemp("slurm")) as slurm:
        yield slurm


@pytest.fixture
def submit(slurm, tmp_path):
    """Submits the script, with another program in place of accelerate."""

    def submit(accelerate, *arguments, options=(), **environment):
        path = tmp_path / "accelerate"
        path.write_text(f"#!/bin/bash\n{accelerate}\n", encoding="utf-8")
        path.chmod(0o755)
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = free.getsockname()[1]
        variables = {
            "PATH": f"{tmp_path}:{os.environ['PATH']}",
            "PORT": str(port),
            "GPUS_PER_NODE": "1",
        }
        variables["CONFIG"] = str(ROOT / "launch" / "ddp8.yaml")
        words = (f"--chdir={tmp_path}", *options, SCRIPT, *arguments)
        return slurm.submit(tmp_path / "output", *words, **(variables | environment))

    return submit


def _until(output, text, times=1, seconds=60):
    end = time.monotonic() + seconds
    while not output.is_file() or (printed := output.read_text()).count(text) < times:
        assert time.monotonic() < end, f"not {times} times {text!r} in: {printed[-3000:]}"
        time.sleep(0.1)


@pytest.mark.slow
def test_slurm_script_hands_on_its_arguments_and_its_config(slurm, submit, tmp_path):
    arguments = ["--recipe", "2b"]
    arguments += ["--set", "data.files=[/a b/*.parquet, $HOME/*]", "--set", "name='n'"]
    printed = 'printf "%s\\n" "$@" > "node$SLURM_NODEID"'
    for config in ("ddp8", "hsdp"):
        path = str(ROOT / "launch" / f"{config}.yaml")
        job = submit(printed, *arguments, CONFIG=path, GPUS_PER_NODE="8")
        slurm.wait(job, "COMPLETED")
        for rank in range(2):
            launched = (tmp_path / f"node{rank}").read_text().splitlines()
            assert launched[-len(arguments) :] == arguments
            options = launch_command_parser().parse_args(launched[1:])
            assert options.config_file == path
            assert (options.num_machines, options.machine_rank) == (2, rank)
            assert (options.num_processes, options.main_process_ip) == (16, NODES[0])
            if config == "hsdp":  # replicas are nodes, shards the GPUs of one
                assert int(options.parallelism_config_dp_replicate_size) == 2
                assert int(options.parallelism_config_dp_shard_size) == 8
            else:
                assert "--parallelism_config_dp_shard_size" not in launched


# A launcher whose rank saves for a while when it is asked to. Like ranks it survives SIGTERM, which
# this Slurm sends to all processes; where it tracks them by cgroups, to the script's shells alone.
SAVES = """
trap : TERM
bash -c 'trap : TERM; trap "asked=yes" USR1; echo began
  until [ "$asked" ]; do sleep 0.1; done
  for ((s = 0; s < SAVE_SECONDS; s++)); do sleep 1; done; echo saved' &
until wait $!; do :; done
"""


@pytest.mark.slow
@pytest.mark.parametrize("end", ["preempted", "cancelled"])
def test_a_preempted_job_saves_and_is_queued_again_a_cancelled_one_only_saves(
    slurm, submit, tmp_path, end
):
    job = submit(SAVES, "--recipe", "2b", SAVE_SECONDS="1")
    _until(tmp_path / "output", "began", times=2)
    if end == "preempted":
        options = ("--partition=high", "--exclusive", "--wrap=true")
        slurm.wait(slurm.submit(tmp_path / "other", *options), "COMPLETED")
        slurm.wait(job, "PENDING")
        assert slurm.about(job, "Restarts") == "1"
        slurm.call("scancel", job)
    else:
        slurm.call("scancel", job)
        slurm.wait(job, "CANCELLED")
        assert slurm.about(job, "Restarts") == "0"
    assert "saved" in (tmp_path / "output").read_text()


@pytest.mark.long
@pytest.mark.timeout(200)
@pytest.mark.parametrize("seconds", [1, 600])
def test_the_job_is_queued_again_before_its_time_limit_however_long_a_save_takes(
    slurm, submit, tmp_path, seconds
):
    options = ("--time=1", "--signal=B:USR1@50")
    job = submit(SAVES, "--recipe", "2b", options=options, SAVE_SECONDS=str(seconds))
    _until(tmp_path / "output", "began", times=2)
    slurm.wait(job, "PENDING", seconds=90)
    assert slurm.about(job, "Restarts") == "1"
    assert ("saved" in (tmp_path / "output").read_text()) == (seconds == 1)
    slurm.call("scancel", job)


@pytest.mark.slow
def test_a_run_that_keeps_failing_is_started_again_a_few_times(slurm, submit, tmp_path):
    job = submit("exit 3", "--recipe", "2b", MAX_RESTARTS="2")
    slurm.wait(job, "FAILED")
    again = "failed (status 3) and starts again from its last checkpoint"
    assert (tmp_path / "output").read_text().count(again) == 2


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_run_survives_lost_launchers_and_preemption(slurm, submit, tiny_overrides, tmp_path):
    overrides = [*tiny_overrides, "train.micro_batch_size=1", "train.steps=400"]
    overrides += ["checkpoint.every_steps=40", "validation.every_steps=0"]
    accelerate = f'exec {sys.executable} -m accelerate.commands.launch "${{@:2}}"'
    arguments = ["--recipe", "debug", *set_arguments(overrides)]
    job = submit(accelerate, *arguments, PYTHONPATH=str(ROOT), **CHILDREN)
    output = tmp_path / "output"
    _until(output, "saved ", seconds=120)
    faults = ("second node's launcher", "first node's launcher", "preemption")
    for resumed, fault in enumerate(faults, start=1):
        _until(output, "saved ", times=output.read_text().count("saved ") + 1, seconds=120)
        if fault == "preemption":
            options = ("--partition=high", "--exclusive", "--wrap=true")
            slurm.wait(slurm.submit(tmp_path / "other", *options), "COMPLETED")
            slurm.start_now(job)
        else:
            number = "1" if fault.startswith("second") else "0"
            for process in processes_with(f"logging.run_dir={tmp_path / 'runs'}"):
                words = process.cmdline()
                if LAUNCHER in words and words[words.index("--machine_rank") + 1] == number:
                    process.kill()
        _until(output, "resuming from", times=resumed, seconds=120)
    slurm.wait(job, "COMPLETED", seconds=120)
    assert slurm.about(job, "Restarts") == "1"
    records = read_metrics(load_recipe("debug", overrides).run_path)
    assert [r["step"] for r in records if r["kind"] == "train"] == list(range(1, 401))
    assert sum(r["kind"] == "session" for r in records) == 4
