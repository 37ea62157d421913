"""Every kind of file that is read: where one is damaged, a sentence names it, and no traceback."""

import contextlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

from results import read_records
from sparsellm.analyze.trace import load_traces
from sparsellm.data.text.corpus import load_corpora
from sparsellm.data.text.identity import read_about
from sparsellm.evaluate.suite import _rows
from sparsellm.recipe import load_recipe
from sparsellm.recipe.sections import DataConfig
from sparsellm.recipe.vocabulary import count_ids, hf_end_of_document
from sparsellm.report import collect, sweep_runs
from sparsellm.runs.files import read_tensors
from sparsellm.runs.huggingface import hf_folder
from sparsellm.runs.huggingface.hf_config import check_config, derive_recipe
from sparsellm.runs.huggingface.recipe_of import load_recipe_of
from sparsellm.runs.lock import ask_to_stop, find
from sparsellm.runs.manifest import read_manifest
from sparsellm.runs.telemetry.dashboard import read_sent
from sparsellm.runs.telemetry.evaluations import read_evaluations
from sparsellm.runs.telemetry.records import read_metrics
from sparsellm.runs.tensor_files import stored_parts
from sparsellm.sweep.plan import load_plan

DIGITS, DEEP = "7" * 5000, "[" * 100_000 + "]" * 100_000
JSON = {  # and what is said of it
    "empty": (b"", "not JSON"),
    "cut": (b'{"step": 1, "tokens"', "not JSON"),
    "list": (b"[]", "expected an object {…}, found list"),
    "number": (b"3", "expected an object {…}, found int"),
    "null": (b"null", "expected an object {…}, found NoneType"),
    "digits": (f'{{"step": {DIGITS}}}'.encode(), "Exceeds the limit"),
    "deep": (f'{{"step": {DEEP}}}'.encode(), "recursion"),
    "no text": (b"\xff\xfe{}", "utf-8"),
}
# An object, which some of the readers take.
OBJECTS = {
    "nothing": b"{}",
    "types": b'{"step": [], "tokens": {}, "format": "2", "pid": "x", "host": 3, "model": []}',
    "nan": b'{"step": NaN, "mean": NaN, "tasks": {"piqa": {"acc": NaN}}, "created": Infinity}',
    "format": b'{"format": 2, "lanes": {"x": 1}, "number": -1, "kind": "train", "runs": [1]}',
    "nulls": b'{"step": null, "kind": null, "tasks": null, "weight_map": null, "model": null}',
}
# That files of some kind have, and one that none has.
KEYS = [
    "step", "tokens", "format", "seed", "corpora", "number", "lanes", "num_lanes", "cursors",
    "parts", "files", "kind", "pid", "host", "model", "vocab", "started", "tasks", "mean",
    "created", "runs", "name", "recipe", "weight_map", "hidden_size", "what", "error", "other",
]  # fmt: skip
YAML = {  # and what is said of it
    "empty": (b"", "found NoneType"),
    "list": (b"- 1\n", "found list"),
    "cut": (b"a: [1\n", "not valid YAML: line 2: "),
    "digits": (f"a: {DIGITS}\n".encode(), "not valid YAML: line 1: Exceeds the limit"),
    "deep": (b"a: " + b"[" * 1000 + b"]" * 1000, "nested too deeply"),
    "aliases": (b"a: &a [x, x]\nb: [*a, *a]\n", "not valid YAML: line 2: aliases (*name) are not"),
    "itself": (b"a: &a [*a]\n", "not valid YAML: line 1: aliases (*name) are not allowed: write"),
    "date": (b"a: 2020-13-45\n", "not valid YAML: line 1: month must be in"),
    "nul": (b"\0", "not valid YAML"),
    "no text": (b"\xff\xfea: 1\n", "not valid YAML: it is not text in UTF-8"),
    "tag": (b"a: !!python/object/apply:os.system [true]\n", "not valid YAML: line 1: "),
    "key": (b"? [a, {b: c}]\n: 1\n", "not valid YAML: line 1: "),
    "twice": (b"a: 1\na: 2\n", "not valid YAML: line 2: key 'a' occurs twice"),
}
BYTES = {
    "empty": b"",
    "cut": b"PK\x03\x04" + b"\0" * 40,
    "header": (10**15).to_bytes(8, "little") + b"{}",
    "digits": (5012).to_bytes(8, "little") + f'{{"x": {DIGITS}}}'.encode().ljust(5012),
    "text": b"not what it should be, by any means",
}


def _stop(path: Path) -> None:
    assert find(path.parent) is None  # to the lock it is that of somebody unknown
    ask_to_stop(path.parent)


def _analysis(path: Path) -> None:
    folder = path.parent / collect.ANALYSIS_FOLDER
    folder.mkdir(exist_ok=True)
    path.rename(folder / path.name)
    collect._analysis(path.parent)


def _config(path: Path) -> None:
    with contextlib.suppress(ValueError):
        derive_recipe(path.parent, path.parent)
    check_config(path.parent, load_recipe("debug"), hf_folder.CHANGED)


def _tokenizer_config(path: Path) -> None:
    (path.parent / "tokenizer.json").write_text('{"model": {"vocab": {}}}', encoding="utf-8")
    hf_end_of_document(f"hf:{path.parent}")


JSON_READERS: dict[str, Callable[[Path], object]] = {
    "manifest.json": lambda path: read_manifest(path.parent),
    "running.json": _stop,
    "wandb_sent.json": read_sent,
    "eval_step_00000001.json": lambda path: read_evaluations(path.parent, []),
    "sparsellm_trainer.json": lambda path: hf_folder.read_trainer(path.parent),
    "model.safetensors.index.json": lambda path: hf_folder.read_weights(path.parent),
    "config.json": _config,
    "tokenizer.json": count_ids,
    "tokenizer_config.json": _tokenizer_config,
    "shard.json": lambda path: read_about(path.with_suffix(".bin")),
    "sweep.json": lambda path: sweep_runs.read_sweep(path.parent),
    "statistics.json": _analysis,
}
LINE_READERS: dict[str, Callable[[Path], object]] = {
    "metrics.jsonl": lambda path: read_metrics(path.parent),
    "bench.jsonl": sweep_runs._lines,
    "results.jsonl": read_records,
    "validation.jsonl": lambda path: _rows(Path("boolq.yaml"), "validation", path),
}
YAML_READERS: dict[str, Callable[[Path], object]] = {
    "mine.yaml": lambda path: load_recipe(str(path)),
    "recipe.yaml": lambda path: load_recipe_of(path.parent),
    "corpus.yaml": lambda path: load_corpora(DataConfig(corpus=str(path))),
    "sweep.yaml": lambda path: load_plan(str(path)),
}


def _read_shard(path: Path) -> object:
    index = {"weight_map": {"w": path.name}}
    (path.parent / hf_folder.INDEX_FILE).write_text(json.dumps(index), encoding="utf-8")
    return hf_folder.read_weights(path.parent)


BYTE_READERS: dict[str, Callable[[Path], object]] = {
    "stats.safetensors": lambda path: read_tensors(path, "restore it"),
    "model.safetensors": stored_parts,
    "model-00001-of-00001.safetensors": _read_shard,
    "traces.npz": lambda path: load_traces(path, 64),
}


def _refused(path: Path, read: Callable[[Path], object], content: bytes, reason: str = "") -> str:
    path.write_bytes(content)
    with pytest.raises((ValueError, OSError)) as caught:
        read(path)
    message = str(caught.value)
    assert path.name in message, message
    assert reason in message, message
    assert len(message) < 2000
    return message


@pytest.mark.parametrize("name", BYTE_READERS)
def test_what_is_no_tensor_file_is_refused(tmp_path, name):
    for content in BYTES.values():
        _refused(tmp_path / name, BYTE_READERS[name], content)


@pytest.mark.parametrize("name", JSON_READERS)
def test_what_is_no_json_object_is_refused(tmp_path, name):
    for content, reason in JSON.values():
        _refused(tmp_path / name, JSON_READERS[name], content, reason)


def _taken_or_refused(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    try:
        (JSON_READERS | LINE_READERS)[path.name](path)
    except (ValueError, OSError) as error:
        assert path.name in str(error) or "tokenizer" in str(error)  # noqa: PT017


@pytest.mark.parametrize("name", JSON_READERS)
def test_objects_of_other_keys_are_taken_or_refused_by_name(tmp_path, name):
    for content in OBJECTS.values():
        _taken_or_refused(tmp_path / name, content)


ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=4)
    ),
    max_leaves=8,
)


@pytest.mark.parametrize("name", [*JSON_READERS, *LINE_READERS])
@settings(max_examples=30, deadline=None)
@given(value=st.dictionaries(st.sampled_from(KEYS), ANY_JSON, max_size=6))
def test_any_object_is_taken_or_refused_by_name(tmp_path_factory, name, value):
    _taken_or_refused(tmp_path_factory.mktemp("any") / name, json.dumps(value).encode() + b"\n")


@pytest.mark.parametrize("name", LINE_READERS)
def test_what_is_no_json_object_is_refused_with_its_line(tmp_path, name):
    for damage, (content, reason) in JSON.items():
        if damage != "empty":
            message = _refused(tmp_path / name, LINE_READERS[name], content + b"\n", reason)
            assert "line 1" in message or damage == "no text"


@pytest.mark.parametrize("name", YAML_READERS)
def test_what_is_no_configuration_is_refused(tmp_path, name):
    for content, reason in YAML.values():
        _refused(tmp_path / name, YAML_READERS[name], content, reason)


@pytest.mark.parametrize("value", [DIGITS, "[" * 1000 + "]" * 1000, "[1", "2020-13-45", "!!x y"])
def test_values_of_the_command_line(value):
    with pytest.raises(ValueError, match=r"--set 'train\.steps=") as caught:
        load_recipe("debug", [f"train.steps={value}"])
    assert len(str(caught.value)) < 1000


def test_a_value_of_the_command_line_is_in_no_line_of_the_file(tmp_path):
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("base: debug\ntrain:\n  steps: 10\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"mine\.yaml with --set train\.steps=x: key 'train.st"):
        load_recipe(str(recipe), ["train.steps=x"])
