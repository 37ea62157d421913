"""How the package is cut: who may import whom, and names that mean one thing."""

import ast
import os
from collections import defaultdict

from conftest import ROOT
from importlinter import api, cli

PACKAGE = ROOT / "sparsellm"
MODULES = [p for p in PACKAGE.rglob("*.py") if "_bundled" not in p.parts]
# They fit anything, and so say nothing. Three fields of reports and records are named so.
VAGUE = {
    *("found", "own", "kept", "given", "known", "others", "wanted", "what", "how", "seen"),
    *("begun", "taken", "made", "many", "much", "asked", "told", "said", "got", "had", "both"),
}
VAGUE_FIELDS = {"kept", "what", "how"}


def test_imports_point_one_way_and_make_no_cycle(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    monkeypatch.syspath_prepend(str(ROOT))
    assert api.read_configuration(str(ROOT / "pyproject.toml"))["contracts_options"]
    # It would silence all loggers that there are, also in later tests.
    monkeypatch.setattr("logging.config.dictConfig", lambda config: None)
    status = cli.lint_imports(config_filename=str(ROOT / "pyproject.toml"), no_cache=True)
    assert status == os.EX_OK, capsys.readouterr().out


def test_a_module_name_means_one_thing():
    places = defaultdict(list)
    for path in MODULES:
        if path.stem not in ("__init__", "__main__", "cli"):
            places[path.stem].append(str(path.relative_to(PACKAGE)))
        if path.stem == "__init__" and path.parent != PACKAGE:
            places[path.parent.name].append(str(path.relative_to(PACKAGE)))
    assert {name: paths for name, paths in places.items() if len(paths) > 1} == {}


def test_a_class_name_means_one_thing():
    places = defaultdict(list)
    for path in MODULES:
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(str(path.relative_to(PACKAGE)))
    assert {name: paths for name, paths in places.items() if len(paths) > 1} == {}


def test_variables_say_what_they_hold():
    vague = []
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_text())):
            stored = isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
            name = node.id if stored else node.arg if isinstance(node, ast.arg) else ""
            if name.strip("_") in VAGUE:
                vague.append((path.stem, name))
    assert {name for _, name in vague} <= VAGUE_FIELDS, vague
    assert len(vague) <= len(VAGUE_FIELDS), vague


def test_every_folder_says_what_it_is_for():
    for path in MODULES:
        if path.name == "__init__.py":
            assert ast.get_docstring(ast.parse(path.read_text())), path
