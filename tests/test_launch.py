"""Every file of launch/ is one that accelerate, or a shell, accepts."""

from __future__ import annotations

import os
import subprocess

import pytest
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from conftest import ROOT

from sparsellm.model import SparseDecoderLayer

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


def _slurm(tmp_path, *arguments):
    """Runs the script with stubs of what Slurm and accelerate would do."""
    stubs = {
        "scontrol": "echo node1",
        "srun": '[ "$1" = --overlap ] || { shift; exec "$@"; }',
        "accelerate": 'printf "%s\\n" "$@"',
    }
    for name, body in stubs.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n", encoding="utf-8")
        (tmp_path / name).chmod(0o755)
    slurm = {"SLURM_JOB_NODELIST": "node1", "SLURM_NNODES": "2", "SLURM_NODEID": "1"}
    environment = os.environ | slurm | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
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
