"""Every file of launch/ is one that accelerate, or a shell, accepts."""

from __future__ import annotations

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
    processes = {"single.yaml": 1, "ddp8.yaml": 8, "fsdp2.yaml": 8}
    assert config.num_processes == processes[path.name]
    assert config.num_machines == 1


def test_fsdp2_shards_our_blocks():
    config = yaml.safe_load((ROOT / "launch" / "fsdp2.yaml").read_text())["fsdp_config"]
    assert config["fsdp_version"] == 2
    assert config["fsdp_transformer_layer_cls_to_wrap"] == SparseDecoderLayer.__name__


def test_slurm_script_is_valid_shell():
    subprocess.run(["bash", "-n", str(ROOT / "launch" / "slurm.sh")], check=True)
