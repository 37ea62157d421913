"""A run on several corpora: their shares, tokens and validation losses."""

from __future__ import annotations

import json

import pytest
from conftest import set_arguments

from sparsellm.recipe import load_recipe
from sparsellm.runs.telemetry.records import read_metrics


def _corpus(folder, name, text):
    for split, count in (("train", 400), ("held", 40)):
        lines = [json.dumps({"body": f"{text} {split} {i} " * 5}) + "\n" for i in range(count)]
        (folder / f"{name}-{split}.jsonl").write_text("".join(lines))
    path = folder / f"{name}.yaml"
    path.write_text(
        f"source: files\nfiles: '${{CORPUS_DIR}}/{name}-train.jsonl'\n"
        f"validation_files: '${{CORPUS_DIR}}/{name}-held.jsonl'\ntext_field: body\n"
    )
    return path


def test_text_that_repeats_is_told_and_counted(tiny_overrides, tmp_path, cli_here):
    """A document of 1,280 tokens ends within the 40th sequence of 32: the last one of step 5."""
    (tmp_path / "a.txt").write_text("x" * 1279)
    overrides = [*tiny_overrides, f"data.corpus={tmp_path / 'a.txt'}", "data.tokenizer=bytes"]
    overrides += ["data.validation_fraction=0", "validation.every_steps=0"]
    trained, resumed = (
        cli_here("train", "debug", *set_arguments([*overrides, f"train.steps={steps}"]))
        for steps in (6, 7)
    )
    assert (trained.returncode, resumed.returncode) == (0, 0), trained.stderr + resumed.stderr
    records = read_metrics(load_recipe("debug", overrides).run_path, "train")
    assert [r.get("epochs") for r in records] == [
        *[None] * 4,
        {"local": 1 / 8},
        {"local": 1},
        {"local": 1},
    ]
    lines = trained.stdout.splitlines()
    assert [line for line in lines if "text of corpus" in line] == [
        "step 5: text of corpus local repeats from here on: a part of it has been read to its end"
    ]
    assert ["epoch 1.12" in line for line in lines if line.startswith("step 5/")] == [True]
    assert not any("epoch" in line for line in lines if line.startswith("step 4/"))
    assert "text of corpus" not in resumed.stdout
    assert "epoch 2.00" in resumed.stdout


def test_a_mixture_is_recorded_by_corpus_and_resumes(tiny_overrides, tmp_path, cli_here):
    paths = [_corpus(tmp_path, "words", "some words"), _corpus(tmp_path, "code", "f(x)")]
    (tmp_path / "both.yaml").write_text(
        f"source: mixture\ncorpora: {{{paths[0]}: 3, {paths[1]}: 1}}\n"
    )
    overrides = [*tiny_overrides, f"data.corpus={tmp_path / 'both.yaml'}"]
    for steps in (2, 4):
        trained = cli_here("train", "debug", *set_arguments([*overrides, f"train.steps={steps}"]))
        assert trained.returncode == 0, trained.stderr
    assert "resuming from" in trained.stdout
    assert "| words " in trained.stdout
    records = read_metrics(load_recipe("debug", overrides).run_path)
    counted = [r["corpus_tokens"] for r in records if r["kind"] == "train"]
    assert [sum(tokens.values()) for tokens in counted] == [256, 512, 768, 1024]
    assert counted[-1]["code"] == pytest.approx(256, abs=64)
    held_out = [r for r in records if r["kind"] == "validation"][-1]
    assert held_out["by_corpus"].keys() == {"words", "code"}
    assert (
        min(held_out["by_corpus"].values()) < held_out["loss"] < max(held_out["by_corpus"].values())
    )

    further = ["seed=1", "data.on_mismatch=restart", "train.steps=6"]
    restarted = cli_here("train", "debug", *set_arguments([*overrides, *further]))
    assert "data stream starts over" in restarted.stdout, restarted.stderr
    records = read_metrics(load_recipe("debug", overrides).run_path, "train")
    counted = [r["corpus_tokens"] for r in records]
    assert [sum(tokens.values()) for tokens in counted] == [256 * step for step in range(1, 7)]
    assert counted[5]["code"] >= counted[3]["code"]

    one = [*tiny_overrides, f"data.corpus={paths[0]}", "data.text_field=nope"]
    refused = cli_here("train", "debug", *set_arguments([*one, "name=other"]))
    assert refused.returncode == 1
    assert (
        "line 1 has no key 'nope'; it has body. Name its text with data.text_field"
        in refused.stderr
    )
