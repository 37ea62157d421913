"""The benchmark of checkpoints: real saves and loads of a small run."""

from __future__ import annotations

from conftest import set_arguments

from sparsellm.recipe import load_recipe


def test_every_figure_is_measured_and_nothing_is_left(tiny_overrides, cli_here):
    own = [*tiny_overrides, "validation.every_steps=0"]
    found = cli_here("bench", "checkpoint", "--recipe", "debug", *set_arguments(own))
    assert found.returncode == 0, found.stderr
    for name in ("blocked_first", "blocked", "blocked_throughout", "save_rate", "verify", "load"):
        assert f" {name} " in found.stdout.replace(":", " "), found.stdout
    run_path = load_recipe("debug", own).run_path
    assert not run_path.exists()
    run_path.mkdir()
    again = cli_here("bench", "checkpoint", "--recipe", "debug", *set_arguments(own))
    assert again.returncode == 1
    assert "exists; give another name: --set name=NEW" in again.stderr
