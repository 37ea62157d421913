"""What commands refuse before they load anything."""

from __future__ import annotations

from pathlib import Path

import pytest

from sparsellm.arguments import check_out
from sparsellm.cli import main

COUNTS = {
    "analyze RUN": ("--tokens", "--micro-batch-size"),
    "bench train --recipe debug": ("--gpus", "--steps", "--tokens-per-gpu"),
    "eval RUN": ("--limit", "--batch-size"),
    "export RUN DIR --drop-dead": ("--drop-dead-tokens", "--micro-batch-size"),
    "generate RUN --prompt x": ("--max-new-tokens",),
}


@pytest.mark.parametrize("value", ["0", "-5", "2.5"])
@pytest.mark.parametrize("command", COUNTS)
def test_counts_are_whole_numbers_of_at_least_1(command, value, capsys):
    for option in COUNTS[command]:
        with pytest.raises(SystemExit):
            main([*command.split(), option, value])
        message = f"argument {option}: '{value}' is no whole number of at least 1\n"
        assert capsys.readouterr().err.endswith(message)


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
        (file, True, "file is no folder.*name another folder: --out"),
        (file / "deep" / "new", False, "file is no folder"),
    ):
        with pytest.raises(ValueError, match=f"{path} cannot be written .*{why}"):
            check_out(path, is_folder=is_folder)
    monkeypatch.setattr("os.access", lambda path, mode: path != folder)  # root may write anywhere
    check_out(file)
    with pytest.raises(ValueError, match="folder is write-protected"):
        check_out(folder / "deep" / "new")
