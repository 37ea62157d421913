"""What the documents say can be typed, is there, and what a CPU can run, runs."""

import argparse
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from conftest import ROOT, TINY, set_arguments
from documents import (
    COMMENTED,
    DOCUMENTS,
    arguments_of,
    blocks_of,
    check_command,
    commands_in,
    commented_commands,
    prose_of,
)
from warm import ranks

from sparsellm.cli import make_parser
from sparsellm.recipe import Recipe
from sparsellm.recipe.keys import all_keys

BLOCKS = [block for document in DOCUMENTS for block in blocks_of(document)]
SHELL = [block for block in BLOCKS if block.language == "sh"]
# Options of other programs that the text speaks of.
FOREIGN_OPTIONS = {
    "--unidiff-zero",  # git apply
    "--cpus-per-task",
    "--entrypoint",
    "--export",
    "--model",
    "--model-impl",
    "--model_args",
    "--num_processes",
    "--pattern-rate",  # benchmarks/nanochat_arena.py
    "--signal",
}
# What docs/extending.md has its reader write.
TO_BE_WRITTEN = {"cuda/sm100/", "data/mine.yaml", "eval/tasks/boolq.yaml", "recipes/wide.yaml"}
LANGUAGES = ("sh", "python", "text", "yaml", "diff")
FOLDERS = "benchmarks|cuda|data|docs|eval|examples|launch|recipes|sparsellm|tests"


def test_every_block_has_a_language():
    without = [str(b) for b in BLOCKS if b.language not in LANGUAGES]
    assert without == []
    assert len(SHELL) > 15


@pytest.mark.parametrize("block", SHELL, ids=str)
def test_every_command_exists(block):
    bash = ["bash", "-n"]
    subprocess.run(bash, input=block.text, text=True, check=True)
    for words in commands_in(block.text):
        check_command(words)


@pytest.mark.parametrize("path", COMMENTED, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_every_command_in_a_comment_exists(path):
    for words in commands_in(commented_commands(path)):
        check_command(words)


def test_commands_in_comments_are_found():
    commands = [words for path in COMMENTED for words in commands_in(commented_commands(path))]
    assert len(commands) > 10
    assert any("--num_processes" not in words and words[0] == "sbatch" for words in commands)


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.language == "python"], ids=str)
def test_python_compiles(block):
    compile(block.text, str(block), "exec")


def every_parser(parser):
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                yield from every_parser(below)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_options_keys_and_paths_in_the_text_exist(document):
    options = {
        name
        for parser in every_parser(make_parser())
        for action in parser._actions
        for name in action.option_strings
    }
    keys = set(all_keys(Recipe))
    sections = "|".join(key for key in keys if "." not in key)
    for line, span in prose_of(document):
        where = f"{document.relative_to(ROOT)}:{line}: `{span}`"
        for option in re.findall(r"(?<!\S)(--[a-z][\w-]*)", span):
            assert option in options | FOREIGN_OPTIONS, where
        for key in re.findall(rf"(?<![\w./])((?:{sections})\.[a-z_0-9]+)", span):
            is_file = key.endswith((".py", ".safetensors"))
            assert key in keys or is_file, where
        for test in re.findall(r"tests/[\w/]+(?:\.py)?", span):
            assert (ROOT / test).exists(), where
        if span not in TO_BE_WRITTEN and re.fullmatch(rf"(?:{FOLDERS})/[\w./*<>-]*", span):
            pattern = re.sub(r"<\w+>", "*", span).rstrip("/")
            assert any(ROOT.glob(pattern)), where


def test_links_of_the_plain_documents_lead_somewhere():
    # Those of docs/ are checked by the build, see test_docs.py.
    for document in DOCUMENTS:
        if document.parent != ROOT / "docs":
            for target in re.findall(r"\]\(([^)#]+)", document.read_text(encoding="utf-8")):
                if not target.startswith("http"):
                    assert (document.parent / target).exists(), (document, target)


# Compiling takes longer than all that these steps compute.
SMALL = [value for value in TINY if not value.startswith("train.steps")] + ["runtime.compile=false"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of the debug recipe, made tiny, as ``runs/debug``."""
    folder = tmp_path_factory.mktemp("trained")
    overrides = [*SMALL, "train.steps=4", f"logging.run_dir={folder / 'runs'}"]
    ranks(1, "-m", "sparsellm", "train", "debug", *set_arguments(overrides))
    return folder


RUNNABLE = sorted({block.document for block in SHELL if not block.not_run})


@pytest.mark.parametrize("document", RUNNABLE, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_what_a_cpu_can_run_runs(document, trained, tmp_path, monkeypatch, cli_here):
    shutil.copytree(trained / "runs", tmp_path / "runs")
    monkeypatch.chdir(tmp_path)
    for block in SHELL:
        if block.document != document or block.not_run:
            continue
        for words in commands_in(block.text):
            if words[0] == "eval":  # what it evaluates is a command of its own here
                continue
            arguments = arguments_of(words)
            assert arguments is not None, f"{block}: {words}: mark the block as not run"
            cli_here(*made_tiny(arguments))
    for block in BLOCKS:
        ours = block.document == document and block.text.startswith("import sparsellm")
        if ours and not block.not_run:
            exec(compile(block.text, str(block), "exec"), {})


def made_tiny(arguments):
    """A training of the trained model's size that does a few steps."""
    if arguments[0] != "train":
        return arguments
    return [*arguments, *set_arguments([*SMALL, "train.steps=6"])]


def test_runs_of_the_documents_are_of_one_tiny_model():
    assert any("train debug" in b.text for b in SHELL if not b.not_run)
    assert Path(ROOT / "docs" / "training.md") in RUNNABLE


def test_every_file_of_device_code_is_explained():
    text = (ROOT / "cuda" / "README.md").read_text(encoding="utf-8")
    sections = re.split(r"^## (\w+)/$", text, flags=re.MULTILINE)[1:]
    assert sorted(sections[::2]) == sorted(
        path.name for path in (ROOT / "cuda").iterdir() if path.is_dir()
    )
    for folder, content in zip(sections[::2], sections[1::2], strict=True):
        first_cells = " ".join(re.findall(r"^\| (.*?) \|", content, flags=re.MULTILINE))
        files = {path.name for path in (ROOT / "cuda" / folder).iterdir()}
        assert files == set(re.findall(r"`(\w+\.cuh?)`", first_cells)), folder
