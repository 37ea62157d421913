"""Errors that need no PyTorch come before it is imported, which takes seconds, or a minute."""

import json
import os
import subprocess
import sys

import pytest
from conftest import process_env

from sparsellm.paths import REFERENCE_VARIABLE
from sparsellm.recipe import load_recipe
from sparsellm.runs.checkpoint import RECIPE_FILE, TRAINER_FILE
from sparsellm.runs.lock import PRESENCE_FILE, Presence
from sparsellm.runs.manifest import Manifest, write_manifest, write_pieces

# Runs commands in one process, in which neither torch nor transformers can be imported.
_PROGRAM = """
import contextlib, io, json, sys
sys.modules |= dict.fromkeys(["torch", "transformers"])
from sparsellm.cli import main
answers = []
for command in json.loads(sys.argv[1]):
    errors, output = io.StringIO(), io.StringIO()
    with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(output):
        try:
            status = main(command)
        except SystemExit as end:
            status = end.code
        except ImportError as error:
            status = str(error)
    answers.append((status, errors.getvalue(), output.getvalue()))
print(json.dumps(answers))
"""

# In a folder with an occupied folder `full`, runs in `runs` and bad text, and without a GPU.
REFUSED = {
    "train nope": "error: recipe 'nope': no such file",
    "train debug --set train.stepz=1": "nearest valid key",
    "train debug --set data.corpus=nope": "nope",
    "train debug --set logging.run_dir=full/file/runs": "full/file/runs/debug cannot be written "
    "(full/file is not a folder); name another folder: --set logging.run_dir=DIR",
    "train debug --set name=busy": "runs/busy is being trained: process {pid} on host",
    "train debug --set name=debug --set model.hidden_size=64": (
        "runs/debug/checkpoints/step_00000002 holds a model of other shapes (changed since the "
        "checkpoint: model.hidden_size 128 → 64): to go on with its model, train "
        "runs/debug/checkpoints/step_00000002/recipe.yaml in place of the recipe (or repeat the "
        "command with its --init-from); for a new model, use another name, --set name=NEW, or "
        "start over with --fresh"
    ),
    "train debug --set name=debug --set optimizer.name=muon": "of optimizer.name adamw, not muon",
    "train debug --set ffn.kernels=sparse": "ffn.kernels: sparse needs a GPU; on a CPU it would be "
    "slower than dense: set ffn.kernels=auto",
    "train debug --resume full": "--resume full is not a checkpoint or a run that has one",
    "train debug --set name=new --init-from full": "full is not a checkpoint",
    "train debug --set name=new --init-from runs/debug --set model.hidden_size=64": (
        "runs/debug/checkpoints/step_00000002 holds a model of other shapes (changed since the "
        "checkpoint: model.hidden_size 128 → 64): train a recipe of the same shapes"
    ),
    "train debug --set name=new --init-from llama --set model.intermediate_size=96": (
        "llama holds a model of other shapes (changed since the checkpoint: "
        "model.intermediate_size 384 → 96): train a recipe of the same shapes"
    ),
    "train debug --set name=new --init-from runs/debug --set ffn.ramp_steps=5": (
        "ffn.ramp_from: silu, but the model in runs/debug/checkpoints/step_00000002 has relu: set "
        "ffn.ramp_steps=0"
    ),
    "train debug --fresh --init-from runs/gone": "runs/gone is not a checkpoint",
    "train debug --set logging.wandb=online": "wandb has no API key: run `wandb login`",
    "train debug --set data.files=[text/bad.jsonl]": "bad.jsonl: line 1 is of type list",
    "train debug --set data.files=[text] --set validation.every_steps=0": "line 1 is of type list",
    "export runs/debug full": "full exists and is not empty; give a new folder, or delete it first",
    "export runs/debug new --license MIT": "--license 'MIT': give the hub's identifier",
    "export runs/debug new --max-shard-size 4": "--max-shard-size '4': write it as 4GB",
    "export runs/debug new --drop-dead --device cuda": "--device cuda: there is no GPU here",
    "export full new": "full is not a checkpoint",
    "import full runs/debug": "runs/debug exists and is not empty",
    "import full new": "full is not an exported folder: it has no config.json; give "
    "one that `sparsellm export` wrote",
    "analyze full": "full is not a checkpoint",
    "analyze runs/debug --out text/bad.jsonl": "text/bad.jsonl cannot be written "
    "(text/bad.jsonl is not a folder); name ano",
    "generate full": "full is not a checkpoint",
    "generate full --device cuda": "--device cuda: there is no GPU here; omit --device",
    "generate full --temperature -1": "may be negative",
    "eval full": "full is not a checkpoint",
    "eval runs/debug --kernels sparse": "--kernels sparse needs a GPU; on a CPU it would be slower",
    "eval runs/debug --out full": "full cannot be written (it is a folder)",
    "eval runs/debug --out text/bad.jsonl": "text/bad.jsonl cannot be written (it exists, and this "
    "command did not write it); name another file: --out",
    "sweep mine.yaml --set logging.wandb=online": "wandb has no API key: run `wandb login`",
    "report": "give run folders, or one sweep: --sweep runs/quality",
    "report full --sweep full": "give run folders, or one sweep",
    "report full --out text/bad.jsonl": "text/bad.jsonl cannot be written (it exists, and this ",
    "report full --out full": "full cannot be written (it is a folder); name another file: --out",
    "report full": "full is not a run: it has no metrics.jsonl",
    "report runs/many": "runs/many is not a run: it has no metrics.jsonl; give one of its runs, or "
    "report the whole sweep: sparsellm report --sweep runs/many",
    "report --sweep full": "has no sweep.json",
    "bench ffn": "bench ffn measures GPU kernels and needs a CUDA device",
    "bench ffn-train": "bench ffn-train measures GPU kernels and needs a CUDA device",
    "bench forward full": "bench forward measures GPU kernels and needs a CUDA device",
}


def _write_checkpoint(run_path):
    """All of one that is read without torch."""
    folder = run_path / "checkpoints" / "step_00000002"
    folder.mkdir(parents=True)
    contents = {
        RECIPE_FILE: load_recipe("debug").to_yaml(),
        TRAINER_FILE: json.dumps({"step": 2, "tokens": 16384}),
    }
    files = {
        name: write_pieces(folder / name, [memoryview(text.encode())])
        for name, text in contents.items()
    }
    manifest = Manifest(id="a", ancestors=[], step=2, created="", world_size=1, files=files)
    write_manifest(folder, manifest)


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """Exit status, standard error and output of each command, with paths seen from `here`."""
    folder = tmp_path_factory.mktemp("here")
    for name in ("full", "text", "llama", "runs/busy", "runs/many"):
        (folder / name).mkdir(parents=True)
    (folder / "runs" / "many" / "sweep.json").write_text("{}")
    (folder / "full" / "file").write_text("")
    config = {"model_type": "llama", "hidden_size": 128, "intermediate_size": 384}
    (folder / "llama" / "config.json").write_text(json.dumps(config))
    (folder / "text" / "bad.jsonl").write_text("[1]\n" * 9)
    (folder / "mine.yaml").write_text("{name: mine, recipe: debug, runs: [{name: a}]}")
    _write_checkpoint(folder / "runs" / "debug")
    presence = Presence.within(folder / "runs" / "busy", "id").model_dump_json()
    (folder / "runs" / "busy" / PRESENCE_FILE).write_text(presence)
    environment = process_env(CUDA_VISIBLE_DEVICES="", HOME=str(folder))
    for name in ("WANDB_API_KEY", REFERENCE_VARIABLE):
        environment.pop(name, None)
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, json.dumps([command.split() for command in REFUSED])],
        capture_output=True, text=True, check=True, cwd=folder, env=environment,
    )  # fmt: skip
    printed = done.stdout.splitlines()[-1].replace(f"{folder}/", "")
    return dict(zip(REFUSED, json.loads(printed), strict=True))


@pytest.mark.parametrize("command", REFUSED)
def test_a_mistake_is_told_before_pytorch_is_loaded(command, answers):
    status, error, output = answers[command]
    assert (status, output) == (1, ""), (status, output, error)
    (line,) = error.splitlines()
    assert line.startswith("error: ")
    assert REFUSED[command].replace("{pid}", str(os.getpid())) in line
