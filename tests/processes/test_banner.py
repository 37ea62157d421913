"""The lines before a run: what they say, what they warn of, and that they come first."""

import re
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import python, set_arguments

from sparsellm.processes.banner import (
    Launch,
    Machine,
    banner,
    beginning_of,
    short_of_memory,
    short_on_gpus,
    unused_gpus,
    warnings,
)
from sparsellm.recipe import load_recipe
from sparsellm.waiting import rewrite, waiting

GIB = 2**30
CPU = Machine(gpus=(), gpu_bytes=None, cores=2, memory_bytes=24 * GIB)
NODE = Machine(gpus=("NVIDIA H200",) * 8, gpu_bytes=140 * GIB, cores=64, memory_bytes=1024 * GIB)
ALONE, ALL = Launch(1, 1), Launch(8, 8)


def test_it_comes_before_torch_is_imported(tiny_overrides):
    blocked = "import sys; sys.modules['torch'] = sys.modules['transformers'] = None\n"
    command = ["train", "debug", *set_arguments(tiny_overrides)]
    code = f"{blocked}from sparsellm.cli import main\nmain({command})"
    done = python("-c", code, status=1)
    assert "import of torch halted" in done.stderr
    assert done.stdout.startswith("sparsellm ")
    assert "folder" in done.stdout


def test_a_node_of_eight():
    lines = banner(load_recipe("0.5b"), "0.5b", "new", NODE, ALL)
    assert "514 M parameters (331 M active): 8 layers, 2048/5632, gated ReLU" in lines
    assert "10,000 of 1,048,576 tokens: 10.5 G in all" in lines
    assert "8 of 8 × NVIDIA H200, 140 GiB each" in lines
    assert "8; a step is 4 micro-batches of 16 sequences on each" in lines
    assert "runs/0.5b/: new" in lines
    assert "warning" not in lines
    two_nodes = banner(load_recipe("0.5b"), "0.5b", "new", NODE, replace(ALL, world_size=16))
    assert "8 of 8 × NVIDIA H200, 140 GiB each on each of 2 nodes" in two_nodes


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        ([], "sample"),
        (["data.files=[/mine]"], "/mine; held out: 0.01 of the documents"),
        (["data.files=[/a,/b]", "data.validation_files=[/c]"], "/a, /b; held out: /c"),
        (["data.files=[/a]", "data.validation_fraction=0"], "/a"),
    ],
)
def test_the_text_is_named_and_what_is_held_out(overrides, text):
    lines = banner(load_recipe("debug", overrides), "debug", "new", CPU, ALONE)
    assert f"  text       {text}\n" in lines


def test_what_a_machine_cannot_train_is_said():
    on_cpu = warnings(load_recipe("2b"), CPU, ALONE)
    assert any("2 CPU cores take at least 95 years" in line for line in on_cpu)
    [short] = [line for line in on_cpu if "are needed and this machine has 24" in line]
    assert "about 39 GiB, 34 of them without activations, are" in short
    assert "try a smaller model (" in short
    shallow = warnings(load_recipe("2b", ["model.num_hidden_layers=24"]), CPU, ALONE)
    assert any("try runtime.activation_checkpointing=true (" in line for line in shallow)
    assert warnings(load_recipe("debug"), CPU, ALONE) == []
    small = replace(NODE, gpus=("RTX 4090",), gpu_bytes=24 * GIB)
    [line] = warnings(load_recipe("0.5b"), small, ALONE)
    assert "about 27 GiB are needed and a RTX 4090 has 24" in line
    assert "train.micro_batch_size" in line


def test_fp8_without_a_gpu_is_said_to_be_emulated():
    recipe = load_recipe("debug", ["runtime.precision=fp8"])
    [line] = warnings(recipe, CPU, ALONE)
    assert line.startswith("no GPU: runtime.precision: fp8 is emulated, which gives the numbers")
    assert warnings(recipe, replace(NODE, gpus=("H100",)), ALONE) == []


def test_one_of_a_thing_is_not_named_in_the_plural():
    one = ["model.num_hidden_layers=1", "train.micro_batch_size=1", "train.global_batch_tokens=256"]
    lines = banner(load_recipe("debug", one), "", "new", replace(CPU, cores=1), ALONE)
    assert ": 1 layer, 128/352" in lines
    assert "CPU, 1 core, 24 GiB" in lines
    assert "1; a step is 1 micro-batch of 1 sequence on each\n" in lines
    growing = load_recipe("debug", [*one, "train.micro_batch_size=auto"])
    lines = banner(growing, "", "new", CPU, ALONE)
    assert "1; a step is 1 sequence on each, as many at once as fit\n" in lines


def test_memory_is_that_of_the_launch_and_so_is_the_remedy(monkeypatch):
    h100 = replace(NODE, gpus=("H100",) * 8, gpu_bytes=66 * GIB)
    recipe = load_recipe("8b")
    fsdp2 = Launch(16, 8, shards=16)
    assert short_of_memory(recipe, h100, fsdp2) is None  # 63 GiB
    line = short_of_memory(recipe, h100, replace(fsdp2, shards=8))  # HSDP: 68
    assert "about 68 GiB are needed and a H100 has 66" in line
    assert line.count("try a smaller train.micro_batch_size or runtime.activation_checkpoint") == 1
    assert "or more GPUs (" in line
    wide = load_recipe("2b", ["model.intermediate_size=22528"])
    line = short_of_memory(wide, h100, Launch(8, 8))
    assert "about 113 GiB, 101 of them without activations, are needed" in line
    assert "try launch/fsdp2.yaml on several GPUs or a smaller model (" in line
    shown = short_on_gpus(recipe, h100, 16)
    assert [line.partition(":")[0] for line in shown] == ["DDP", "HSDP 2 × 8"]
    assert short_on_gpus(recipe, CPU, 16) == []
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("WORLD_SIZE", "16")
    assert Launch.present().shards == 16
    monkeypatch.setenv("PARALLELISM_CONFIG_DP_SHARD_SIZE", "8")
    assert Launch.present().shards == 8


def test_recipe_show_warns_as_the_banner_does(cli_here, monkeypatch):
    monkeypatch.setattr(Machine, "present", lambda: replace(NODE, gpu_bytes=80 * GIB))
    shown = cli_here("recipe", "show", "8b", "--gpus", "16").stdout
    assert shown.count("# warning: ") == 1
    assert "# warning: DDP: about 138 GiB, 120 of them without activations, are needed" in shown


def test_gpus_that_are_left_idle():
    [line] = warnings(load_recipe("0.5b"), NODE, ALONE)
    assert "8 GPUs are here and 1 will be used" in line
    assert unused_gpus(NODE, "cuda", "2.11") is None
    assert unused_gpus(CPU, "cpu", "2.11") is None
    assert "PyTorch 2.11+cpu finds no CUDA device" in unused_gpus(NODE, "cpu", "2.11+cpu")


def test_gpus_are_found_by_the_driver_as_cuda_shows_them(tmp_path, monkeypatch):
    for bus in ("0000:01", "0000:02", "0000:03"):
        (tmp_path / bus).mkdir()
        (tmp_path / bus / "information").write_text(f"Model: \t NVIDIA {bus[-2:]}\nIRQ: 1\n")
    monkeypatch.setattr("sparsellm.processes.banner._DRIVER", tmp_path)
    monkeypatch.setattr("sparsellm.processes.banner._gpus_by_nvml", lambda: None)
    for visible, expected in ((None, 3), ("2", 1), ("0,2", 2), ("", 0), ("-1", 0), ("GPU-1a", 1)):
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert len(Machine.present().gpus) == expected
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2")
    assert Machine.present().gpus == ("NVIDIA 03",)


def test_how_a_run_begins(tiny):
    recipe = tiny()
    assert beginning_of(recipe, None, False, None) == "new"
    assert beginning_of(recipe, None, False, Path("w")) == "new, with the weights of w"
    newest, other = recipe.run_path / "checkpoints" / "step_00000002", Path("other/step_00000003")
    newest.mkdir(parents=True)
    assert beginning_of(recipe, newest, False, Path("w")) == "resumes from step_00000002"
    assert beginning_of(recipe, None, True, None) == "new; the earlier run is moved aside"
    assert beginning_of(recipe, other, False, None) == "new, goes on from other/step_00000003"


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ([], "auto: both are measured first"),
        (["ffn.kernels=dense"], "dense, as ffn.kernels says"),
        (["ffn.activation=silu"], "dense: SiLU leaves no zeros to skip"),
    ],
)
def test_kernels_and_why(overrides, says, monkeypatch):
    monkeypatch.setattr("sparsellm.processes.banner.has_cupy", lambda: True)
    assert says in banner(load_recipe("debug", overrides), "debug", "new", NODE, ALL)
    monkeypatch.setattr("sparsellm.processes.banner.has_cupy", lambda: False)
    if not overrides:
        assert "CuPy is not installed" in banner(load_recipe("debug"), "debug", "new", NODE, ALL)
        assert "there is no GPU" in banner(load_recipe("debug"), "debug", "new", CPU, ALONE)


def test_signs_of_life(monkeypatch):
    monkeypatch.setattr("sparsellm.waiting.QUIET_SECONDS", 0.02)
    monkeypatch.setattr("sparsellm.waiting.REPEAT_SECONDS", 0.02)
    lines: list[str] = []
    several = threading.Event()

    def say(line: str) -> None:
        lines.append(line)
        if len(lines) == 3:
            several.set()

    with waiting("compiling", say):
        assert several.wait(10)
    assert lines[0] == "compiling …"
    assert lines[1].startswith("compiling … ")
    assert lines[-1].startswith("compiling: ")
    monkeypatch.setattr("sparsellm.waiting.QUIET_SECONDS", 60)
    lines.clear()
    with waiting("nothing", say):
        pass
    assert lines == []


def test_on_a_terminal_seconds_are_counted_in_place(monkeypatch):
    monkeypatch.setattr("sparsellm.waiting.QUIET_SECONDS", 0.02)
    monkeypatch.setattr("sparsellm.waiting.TICK_SECONDS", 0.02)
    monkeypatch.setenv("COLUMNS", "21")
    several, shown = threading.Event(), []

    def write(text: str) -> None:
        shown.append(text)
        if len(shown) > 6:
            several.set()

    terminal = SimpleNamespace(isatty=lambda: True, write=write, flush=lambda: None)
    monkeypatch.setattr("sys.stderr", terminal)
    with waiting("loading"):
        assert several.wait(10)
    lines = "".join(shown)
    assert re.match(r"\rloading … {11}\r\rloading … \d s {7}\r", lines)
    assert re.search(r"\r {20}\rloading: \d s\n$", lines)


def test_a_process_without_stderr_waits_all_the_same(monkeypatch):
    monkeypatch.setattr("sys.stderr", None)
    with waiting("loading"):
        rewrite("step 1")
