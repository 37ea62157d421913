"""What the documents of this repository tell a reader to type, and whether it exists."""

import re
import shlex
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from conftest import ROOT

from sparsellm.cli import make_parser
from sparsellm.recipe import Recipe, load_recipe
from sparsellm.recipe.keys import all_keys

DOCUMENTS = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "cuda/README.md")),
    ROOT / "benchmarks" / "README.md",
    *(ROOT / name for name in ("eval/README.md", "recipes/sweeps/README.md")),
    *sorted((ROOT / "docs").glob("*.md")),
]
# Plain files whose comments say how they are used.
COMMENTED = [
    path
    for folder in ("recipes", "launch", "data", "eval")
    for path in sorted((ROOT / folder).rglob("*"))
    if path.suffix in (".yaml", ".sh")
] + [ROOT / "Dockerfile"]

_FENCE = re.compile(r"^( *)```(.*)$")
_NOT_RUN = re.compile(r"^ *<!-- not run: (.+) -->$")
_COMMENT = re.compile(r"^ *#( {2,})(\S.*)$")
_ASSIGNMENT = re.compile(r"^[A-Z_]+=")
# What is not ours and is checked by its name alone.
_OTHERS = {
    "accelerate",
    "cd",
    "docker",
    "eval",
    "git",
    "mkdocs",
    "pre-commit",
    "python",
    "python3",
    "source",
    "sudo",
    "vllm",
}
_COMMANDS = ("sparsellm", "accelerate", "sbatch", "docker", "make")


@dataclass(frozen=True)
class Block:
    """A fenced block of a document.

    Args:
        document: where it stands.
        line: of its fence, from 1.
        language: such as ``sh``; "" is none.
        text: what it holds.
        not_run: why the tests cannot run it (the comment before it); None: they run it.
    """

    document: Path
    line: int
    language: str
    text: str
    not_run: str | None

    def __str__(self) -> str:
        return f"{self.document.relative_to(ROOT)}:{self.line}"


def blocks_of(document: Path) -> Iterator[Block]:
    """The fenced blocks of a document."""
    lines = document.read_text(encoding="utf-8").splitlines()
    opened: int | None = None
    indent = language = ""
    for number, line in enumerate(lines):
        fence = _FENCE.match(line)
        if fence is None:
            continue
        if opened is None:
            opened, (indent, language) = number, fence.groups()
            continue
        before = next((text for text in reversed(lines[:opened]) if text.strip()), "")
        marker = _NOT_RUN.match(before)
        text = "\n".join(text.removeprefix(indent) for text in lines[opened + 1 : number])
        yield Block(document, opened + 1, language, text, marker and marker[1])
        opened = None
    assert opened is None, f"{document}:{opened}: the block does not end"


def prose_of(document: Path) -> list[tuple[int, str]]:
    """Line number and text of each `code` span outside of blocks."""
    spans, fenced = [], False
    for number, line in enumerate(document.read_text(encoding="utf-8").splitlines(), 1):
        if _FENCE.match(line):
            fenced = not fenced
        elif not fenced:
            spans += [(number, span) for span in re.findall(r"`([^`]+)`", line)]
    return spans


def commented_commands(path: Path) -> str:
    """The commands in a file's comments, which stand two spaces or more behind the sign."""
    commands, goes_on = [], False
    for line in path.read_text(encoding="utf-8").splitlines():
        comment = _COMMENT.match(line)
        words = [] if comment is None else comment[2].split()
        while words and _ASSIGNMENT.match(words[0]):
            words.pop(0)
        if comment is not None and (goes_on or (words and words[0] in _COMMANDS)):
            commands.append(comment[2])
            goes_on = comment[2].endswith("\\")
        else:
            goes_on = False
    return "\n".join(commands)


def commands_in(text: str) -> Iterator[list[str]]:
    """The words of each simple command of a shell script; $(…) inside of words too."""
    for line in text.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars=";&|")
        lexer.whitespace_split = True
        words: list[str] = []
        for word in [*lexer, ";"]:
            if set(word) <= set(";&|"):
                while words and (_ASSIGNMENT.match(words[0]) or words[0] in ("do", "then")):
                    words = words[1:]
                if words:
                    yield words
                words = []
                continue
            words.append(word)
            for inner in re.findall(r"\$\(([^)]+)\)", word):
                yield from commands_in(inner)


def arguments_of(words: list[str]) -> list[str] | None:
    """What a command gives to ``sparsellm``; None where it starts something else."""
    if words[0] == "sparsellm":
        return words[1:]
    if "-m" in words and words[words.index("-m") + 1 : words.index("-m") + 2] == ["sparsellm"]:
        return words[words.index("-m") + 2 :]
    if words[0] == "sbatch":
        return ["train", *words[words.index("launch/slurm.sh") + 1 :]]
    if words[:2] == ["docker", "run"]:
        return words[words.index("sparsellm") + 1 :]
    return None


def check_command(words: list[str]) -> None:
    """That a command's program, options, recipe keys and files exist."""
    arguments = arguments_of(words)
    program = Path(words[0]).name
    if program == "make":
        _check_make(words[1:])
    elif program == "pip":
        _check_pip(words)
    elif arguments is None:
        assert program in _OTHERS | {"for", "done"}, words
    for test in (word for word in words if word.startswith("tests/")):
        assert (ROOT / test).exists(), words
    if "--config_file" in words:
        assert (ROOT / words[words.index("--config_file") + 1]).is_file(), words
    for name in re.findall(r"CONFIG=(\w+)", " ".join(words)):
        assert (ROOT / "launch" / f"{name}.yaml").is_file(), words
    if arguments is not None:
        _check_arguments([word.replace("$l1", "1e-4") for word in arguments])


def _check_make(words: list[str]) -> None:
    text = (ROOT / "Makefile").read_text()
    for target in (word for word in words if "=" not in word):
        assert re.search(rf"^{target}:", text, re.MULTILINE), target


def _check_pip(words: list[str]) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for extras in re.findall(r"\.\[([^\]]+)\]", " ".join(words)):
        assert set(extras.split(",")) <= set(project["optional-dependencies"]), words


def _check_arguments(arguments: list[str]) -> None:
    """By the real parser; the recipe with its ``--set`` values by its own checks."""
    try:
        with mock.patch.object(Path, "exists", return_value=True):  # the models of a document
            options = make_parser().parse_args(arguments)
    except SystemExit:
        raise AssertionError(f"the parser refuses: {arguments}") from None
    overrides = getattr(options, "overrides", [])
    keys = {override.partition("=")[0] for override in overrides}
    assert keys <= set(all_keys(Recipe)), arguments
    recipes = getattr(options, "recipe", None) or []
    for recipe in [recipes] if isinstance(recipes, str) else recipes:
        if not recipe.endswith(".yaml"):
            load_recipe(recipe, overrides)
