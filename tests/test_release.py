"""What a release states stands in one place, and the files around it can be read."""

from __future__ import annotations

import pytest
import yaml
from conftest import ROOT

import sparsellm

YAML_FILES = [
    *ROOT.glob(".github/**/*.yml"),
    ROOT / "CITATION.cff",
    ROOT / ".pre-commit-config.yaml",
]


def test_the_citation_has_the_packages_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == sparsellm.__version__
    assert 'dynamic = ["version"]' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")


def test_public_names_are_there_and_need_no_torch_to_be_listed():
    assert sorted(sparsellm.__all__) == ["__version__", "accelerate", "restore"]
    assert all(hasattr(sparsellm, name) for name in sparsellm.__all__)


@pytest.mark.parametrize("path", YAML_FILES, ids=lambda path: path.name)
def test_files_of_the_forge_are_yaml(path):
    assert isinstance(yaml.safe_load(path.read_text(encoding="utf-8")), dict)


def test_continuous_integration_runs_the_readmes_command():
    tests = yaml.safe_load((ROOT / ".github" / "workflows" / "tests.yml").read_text())
    commands = [step.get("run") for step in tests["jobs"]["cpu"]["steps"]]
    assert "make lint test" in commands
    assert "make lint test" in (ROOT / ".ci" / "run").read_text()
