"""What commands refuse before they load anything."""

from argparse import ArgumentTypeError
from contextlib import nullcontext
from pathlib import Path

import pytest

from sparsellm import paths
from sparsellm.arguments import check_device, check_out, model_path
from sparsellm.cli import main

COUNTS = {
    "analyze .": ("--tokens", "--micro-batch-size"),
    "bench train --recipe debug": ("--gpus", "--steps", "--tokens-per-gpu"),
    "eval .": ("--limit", "--batch-size"),
    "export . DIR --drop-dead": ("--drop-dead-tokens", "--micro-batch-size"),
    "generate . --prompt x": ("--max-new-tokens",),
}


@pytest.mark.parametrize("value", ["0", "-5", "2.5"])
@pytest.mark.parametrize("command", COUNTS)
def test_counts_are_whole_numbers_of_at_least_1(command, value, capsys):
    for option in COUNTS[command]:
        with pytest.raises(SystemExit):
            main([*command.split(), option, value])
        message = f"argument {option}: '{value}' is not a whole number of at least 1\n"
        assert capsys.readouterr().err.endswith(message)


@pytest.mark.parametrize(
    "command",
    ["analyze", "eval", "export", "generate", "report", "bench forward", "train --resume"],
)
def test_a_model_that_is_not_there_is_told_before_anything_is_loaded(
    command, tmp_path, monkeypatch, capsys
):
    (tmp_path / "runs" / "debug").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        main([*command.split(), "runs/debgu"])
    message = "runs/debgu: no such file or folder; did you mean runs/debug?\n"
    assert capsys.readouterr().err.endswith(message)


def test_a_model_of_the_hub_is_left_to_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert model_path("owner/name@main") == Path("owner/name@main")
    message = rf"^runs/debug: no such file or folder: {tmp_path} has no folder runs/; give the path"
    with pytest.raises(ArgumentTypeError, match=message):  # a run, not a model of `runs`
        model_path("runs/debug")
    with pytest.raises(ArgumentTypeError, match=r"^gone: no such file or folder$"):
        model_path("gone")


def test_a_place_that_cannot_be_written_is_refused(tmp_path, monkeypatch):
    file, folder = tmp_path / "file", tmp_path / "folder"
    file.touch()
    folder.mkdir()
    monkeypatch.chdir(tmp_path)
    for path in (file, folder / "new", folder / "deep" / "new", Path("new")):
        check_out(path)
    for path in (folder, folder / "new", folder / "deep" / "new"):
        check_out(path, is_folder=True)
    assert not any(folder.iterdir())  # it only looks
    for path, is_folder, why in (
        (folder, False, "it is a folder.*name another file: --out"),
        (file, True, "file is not a folder.*name another folder: --out"),
        (file / "deep" / "new", False, "file is not a folder"),
        (folder / ("é" * 124), False, "its name is too long.*name another file: --out"),
        (folder / ("a" * 256) / "new", True, "File name too long.*name another folder: --out"),
    ):
        with pytest.raises(ValueError, match=f"{path} cannot be written .*{why}"):
            check_out(path, is_folder=is_folder)
    for text, is_replaced in (("", True), ("<html> 1", True), ('{"kind": 1}', False)):
        file.write_text(text)
        with nullcontext() if is_replaced else pytest.raises(ValueError, match="did not write it"):
            check_out(file, begins="<html>")
    with pytest.raises(ValueError, match=r"/dev/null cannot be written .*did not write it"):
        check_out(Path("/dev/null"), begins="<html>")
    monkeypatch.setattr("os.access", lambda path, mode: path != folder)  # root may write anywhere
    check_out(file)
    with pytest.raises(ValueError, match="folder is write-protected"):
        check_out(folder / "deep" / "new")


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="has no /proc")
def test_a_file_system_that_only_seems_to_take_files_is_refused():
    with pytest.raises(ValueError, match=r"cannot be written \(/proc (accepts no files|is write-)"):
        check_out(Path("/proc/runs"), is_folder=True)


def test_a_device_that_is_not_there_is_told_before_pytorch_is_loaded(monkeypatch):
    monkeypatch.setattr("sparsellm.arguments.may_have_gpu", lambda: False)
    for device in (None, "cpu", "mps"):
        check_device(device)
    with pytest.raises(ValueError, match="--device cuda:1: there is no GPU here; omit --device"):
        check_device("cuda:1")
    with pytest.raises(ValueError, match="--device gpu: there is no such device; give cpu, cuda"):
        check_device("gpu")
    monkeypatch.setattr("sparsellm.arguments.may_have_gpu", lambda: True)
    check_device("cuda:1")


def test_no_gpu_is_hidden_by_what_tells_that_there_is_none(tmp_path, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(paths, "_GPU_FILES", (f"{tmp_path}/nvidia*",))
    assert not paths.may_have_gpu()
    (tmp_path / "nvidia0").touch()
    assert paths.may_have_gpu()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert not paths.may_have_gpu()


def test_a_device_that_pytorch_does_not_have(monkeypatch):
    import torch

    from sparsellm.device import pick_device

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match=r"^device cuda:1: PyTorch .* finds no CUDA device.* CPU"):
        pick_device("cuda:1")
    with pytest.raises(ValueError, match="give cpu, cuda or cuda:N"):
        pick_device("gpu")
