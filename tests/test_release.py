"""What a release states stands in one place, and the files around it can be read."""

import re
import shlex
import tomllib

import pytest
import yaml
from conftest import ROOT, python
from documents import check_command, commands_in

import sparsellm
from sparsellm.paths import how_to_install_cuda

YAML_FILES = [
    *ROOT.glob(".github/**/*.yml"),
    ROOT / "CITATION.cff",
    ROOT / ".pre-commit-config.yaml",
]


def test_the_citation_has_the_packages_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == sparsellm.__version__
    assert 'dynamic = ["version"]' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")


def test_the_changelog_starts_with_the_packages_version():
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    newest = re.search(r"^## (\S+)", text, re.MULTILINE)
    assert newest
    assert newest[1] == sparsellm.__version__


def test_public_names_are_there_and_need_no_torch_to_be_listed():
    names = "SparseFFN SparsityController __version__ accelerate load replace_ffns restore train"
    assert dir(sparsellm) == names.split()
    assert all(hasattr(sparsellm, name) for name in sparsellm.__all__)


def test_training_in_a_loop_of_ones_own_needs_no_more_than_torch():
    code = (
        "import sys, sparsellm; assert 'torch' not in sys.modules; "
        "sparsellm.SparseFFN, sparsellm.SparsityController, sparsellm.replace_ffns; "
        "print(sorted({'pydantic', 'transformers', 'accelerate', 'cupy'} & set(sys.modules)))"
    )
    assert python("-c", code).stdout == "[]\n"


@pytest.mark.parametrize("path", YAML_FILES, ids=lambda path: path.name)
def test_files_of_the_forge_are_yaml(path):
    assert isinstance(yaml.safe_load(path.read_text(encoding="utf-8")), dict)


def test_continuous_integration_runs_the_readmes_command():
    tests = yaml.safe_load((ROOT / ".github" / "workflows" / "tests.yml").read_text())
    commands = [step.get("run") for step in tests["jobs"]["cpu"]["steps"]]
    assert "make lint test" in commands
    assert "make lint test" in (ROOT / ".ci" / "run").read_text()


def test_pre_commit_needs_no_venv_and_has_the_versions_of_development():
    pinned = {
        line.partition(" ")[0]
        for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    }
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))
    hooks = {hook["id"]: hook for repo in config["repos"] for hook in repo["hooks"]}
    assert {"ruff-format", "ruff", "mypy", "check-added-large-files"} <= hooks.keys()
    for hook in hooks.values():
        assert hook["language"] == "python"
        assert hook["additional_dependencies"]
        assert set(hook["additional_dependencies"]) <= pinned
    [limit] = re.findall(r"--enforce-all --maxkb=(\d+)", hooks["check-added-large-files"]["entry"])
    largest = max((ROOT / "benchmarks").glob("*.jsonl"), key=lambda path: path.stat().st_size)
    assert largest.stat().st_size <= int(limit) * 1024 <= 3 * 2**20


WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_run_existing_commands(path):
    jobs = yaml.safe_load(path.read_text(encoding="utf-8"))["jobs"].values()
    scripts = [step["run"] for job in jobs for step in job["steps"] if "run" in step]
    assert scripts
    for words in (words for script in scripts for words in commands_in(script)):
        check_command(words)


def test_the_site_is_published_for_tags_alone():
    docs = yaml.safe_load((ROOT / ".github" / "workflows" / "docs.yml").read_text())
    assert docs["jobs"]["deploy"]["if"] == "startsWith(github.ref, 'refs/tags/v')"
    assert docs["jobs"]["deploy"]["needs"] == "build"


def test_the_image_installs_and_starts_existing_commands():
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ")
    steps = [line.split(maxsplit=1) for line in text.splitlines() if re.match(r"[A-Z]+ ", line)]
    commands = [words for name, rest in steps if name == "RUN" for words in commands_in(rest)]
    ours = [words for words in commands if words[0] == "pip"]
    for words in ours:
        check_command(words)
    assert any(".[cuda,eval]" in words for words in ours)
    for _, rest in (step for step in steps if step[0] == "COPY"):
        *sources, _ = shlex.split(rest)
        assert all((ROOT / source).exists() for source in sources)
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert ["ENTRYPOINT", '["sparsellm"]'] in steps
    assert "sparsellm" in scripts
    # The build needs what the wheel is made of: .dockerignore must not hide it.
    hidden = (ROOT / ".dockerignore").read_text().split()
    assert not {"README.md", "LICENSE", "cuda", "recipes", "sparsellm"} & set(hidden)


@pytest.mark.parametrize(("cuda", "package"), [("12.8", "12x"), ("13.0", "13x"), (None, "13x")])
def test_a_machine_without_cupy_is_told_the_package_for_its_cuda(cuda, package):
    assert f"cupy-cuda{package}" in how_to_install_cuda(cuda)
