"""The wheel, built and installed elsewhere, carries everything that training needs."""

import zipfile

import pytest
from conftest import ROOT, python, set_arguments

from sparsellm.paths import BUNDLED_FOLDERS, bundled


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dist")
    python("-m", "build", "--wheel", "--no-isolation", "--outdir", folder, ROOT)
    return next(folder.glob("*.whl"))


@pytest.mark.slow
def test_wheel_trains_away_from_the_checkout(wheel, tmp_path, tiny_overrides, monkeypatch):
    zipfile.ZipFile(wheel).extractall(tmp_path)  # what pip does with a wheel of Python files
    monkeypatch.chdir(tmp_path)
    code = "import sparsellm.paths as p; print(p.bundled('recipes'))"
    where = python("-c", code, PYTHONPATH="")
    assert where.stdout.strip() == str(tmp_path / "sparsellm" / "_bundled" / "recipes")
    train = ("-m", "sparsellm", "train", "debug", *set_arguments(tiny_overrides))
    trained = python(*train, PYTHONPATH="")
    assert "done: 4 steps" in trained.stdout


def test_wheel_carries_every_file_that_users_edit(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    for folder in BUNDLED_FOLDERS:
        files = [p for p in (ROOT / folder).rglob("*") if p.is_file()]
        assert files, folder
        for path in files:
            if "__pycache__" not in path.parts:
                assert f"sparsellm/_bundled/{path.relative_to(ROOT)}" in names
    for path in (ROOT / "sparsellm" / "report" / "assets").iterdir():  # of the report's page
        assert f"sparsellm/report/assets/{path.name}" in names
    assert "sparsellm/py.typed" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_checkout_finds_the_folders_at_its_root():
    for folder in BUNDLED_FOLDERS:
        assert bundled(folder) == ROOT / folder
    with pytest.raises(FileNotFoundError, match=r"no folder 'nope'"):
        bundled("nope")
