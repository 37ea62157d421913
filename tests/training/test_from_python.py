"""`sparsellm.train`: our loop from Python."""

import io
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import yaml
from conftest import ROOT, TINY, process_env
from warm import ranks

import sparsellm
from sparsellm.runs.telemetry.records import read_metrics


def overrides_of(words):
    return {key: yaml.safe_load(value) for key, _, value in (w.partition("=") for w in words)}


def test_it_trains_resumes_and_returns_the_folder_of_the_run(tiny_overrides, capsys):
    overrides = overrides_of(tiny_overrides) | {"runtime.compile": False, "train.steps": 2}
    overrides["data.corpus"] = {"sample": 1.0}
    overrides["optimizer.learning_rate"] = np.float64(1e-3)
    overrides["logging.run_dir"] = Path(overrides["logging.run_dir"])
    folder = sparsellm.train("debug", overrides)
    assert len(read_metrics(folder, "train")) == 2
    assert sparsellm.train("debug", overrides | {"train.steps": 3}) == folder
    assert [r["step"] for r in read_metrics(folder, "train")] == [1, 2, 3]
    assert "done: 3 steps" in capsys.readouterr().out
    assert sparsellm.train("debug", overrides, fresh=True) == folder
    assert [r["step"] for r in read_metrics(folder, "train")] == [1, 2]
    model, _ = sparsellm.load(folder)
    assert model.config.hidden_size == 32
    (checkpoint,) = folder.glob("checkpoints/step_*")
    for argument, steps in (("resume", [3]), ("init_from", [1, 2, 3])):
        settings = overrides | {"name": argument, "train.steps": 3}
        other = sparsellm.train("debug", settings, **{argument: str(checkpoint)})
        assert [r["step"] for r in read_metrics(other, "train")] == steps
    with pytest.raises(ValueError, match=r"--fresh would move --init-from .*; add --set name=NEW"):
        sparsellm.train("debug", overrides, fresh=True, init_from=checkpoint)
    assert checkpoint.is_dir()


def test_a_process_trains_runs_of_several_precisions(tiny_overrides):
    overrides = overrides_of(tiny_overrides) | {"runtime.compile": False, "train.steps": 1}
    for precision in ("fp32", "bf16", "fp32"):
        settings = {"name": precision, "runtime.precision": precision}
        folder = sparsellm.train("debug", overrides | settings, fresh=True)
        assert len(read_metrics(folder, "train")) == 1


@pytest.mark.slow
def test_ranks_that_have_trained_say_that_they_train_one_run(tiny_overrides, tmp_path):
    overrides = overrides_of(tiny_overrides) | {"runtime.compile": False, "train.steps": 1}
    call = f"    sparsellm.train('debug', {overrides!r}, fresh=True)\n"
    script = tmp_path / "script.py"
    script.write_text(f"import sparsellm\nif __name__ == '__main__':\n{call}{call}")
    done = ranks(2, str(script), status=1)
    assert done.stdout.count("done: 1 step") == 1
    assert "start a script with `accelerate launch` once for each run" in done.stderr


def test_lists_and_sections_may_hold_paths_and_numbers_of_numpy(tmp_path):
    section = {"corpus": "sample", "files": [tmp_path / "none"]}
    with pytest.raises(FileNotFoundError, match=rf"data.files: {tmp_path}/none does not exist"):
        sparsellm.train("debug", {"data": section, "train": {"steps": np.int64(1)}})


def test_what_contradicts_names_the_remedy(tiny):
    recipe = tiny()
    with pytest.raises(ValueError, match="a Recipe is trained as it is"):
        sparsellm.train(recipe, {"train.steps": 3})
    with pytest.raises(ValueError, match="give one"):
        sparsellm.train(recipe, fresh=True, resume=ROOT)
    with pytest.raises(ValueError, match=r"train.step.*train.steps"):
        sparsellm.train("debug", {"train.step": 3})
    with pytest.raises(ValueError, match=r"must be a dictionary such as \{'seed': 1\}"):
        sparsellm.train("debug", ["train.steps=3"])
    with pytest.raises(ValueError, match=r"overrides: train.steps is of type object; give numbers"):
        sparsellm.train("debug", {"train.steps": object()})
    blocked = ROOT / "LICENSE" / "runs"
    with pytest.raises(ValueError, match=r"LICENSE is not a folder\); name another .*run_dir=DIR"):
        sparsellm.train(tiny(f"logging.run_dir={blocked}"))
    errors = []

    def call():
        try:
            sparsellm.train(recipe)
        except ValueError as error:
            errors.append(str(error))

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    assert errors == ["sparsellm.train must be called in the main thread, which gets signals"]


@pytest.mark.slow
@pytest.mark.parametrize("source", ["file", "stdin"])
def test_data_workers_do_not_import_the_script(tmp_path, source):
    words = [*TINY, "runtime.compile=false", "data.num_workers=1", "train.steps=1"]
    overrides = overrides_of(words) | {"logging.run_dir": str(tmp_path / "runs")}
    text = f"import sparsellm\nsparsellm.train('debug', {overrides!r})\n"  # without a guard
    script = tmp_path / "script.py"
    script.write_text(text)
    command = [sys.executable, str(script) if source == "file" else "-"]
    settings = {"env": process_env(), "stdout": subprocess.PIPE, "text": True}
    done = subprocess.run(command, check=True, input=text, **settings)
    assert done.stdout.count("done: 1 step") == 1


def test_a_terminal_without_its_characters_does_not_end_a_run(tiny_overrides, monkeypatch):
    overrides = overrides_of(tiny_overrides) | {"runtime.compile": False, "train.steps": 1}
    overrides["sparsity.target_nnz"] = 3  # of which the progress is given with a ×
    printed = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(printed, "ascii"))
    sparsellm.train("debug", overrides)
    sys.stdout.flush()
    assert rb"\xd7 target" in printed.getvalue()
