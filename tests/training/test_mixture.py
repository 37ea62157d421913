"""A run on several corpora: their shares, tokens and validation losses."""

import json

import pytest


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


def test_text_that_repeats_is_told_and_counted(train, tmp_path):
    """A document of 1,280 tokens ends within the 40th sequence of 32: the last one of step 5."""
    (tmp_path / "a.txt").write_text("x" * 1279)
    overrides = [f"data.corpus={tmp_path / 'a.txt'}", "data.tokenizer=bytes"]
    overrides += ["data.validation_fraction=0", "validation.every_steps=0"]
    trained, resumed = (train(*overrides, f"train.steps={steps}") for steps in (6, 7))
    assert [r.get("epochs") for r in resumed.records("train")] == [
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


def test_a_mixture_is_recorded_by_corpus_and_resumes(train, tmp_path):
    paths = [_corpus(tmp_path, "words", "some words"), _corpus(tmp_path, "code", "f(x)")]
    (tmp_path / "both.yaml").write_text(
        f"source: mixture\ncorpora: {{{paths[0]}: 3, {paths[1]}: 1}}\n"
    )
    mixture = f"data.corpus={tmp_path / 'both.yaml'}"
    for steps in (2, 4):
        trained = train(mixture, f"train.steps={steps}")
    assert "resuming from" in trained.stdout
    assert "| words " in trained.stdout
    counted = [r["corpus_tokens"] for r in trained.records("train")]
    assert [sum(tokens.values()) for tokens in counted] == [256, 512, 768, 1024]
    assert counted[-1]["code"] == pytest.approx(256, abs=64)
    held_out = trained.records("validation")[-1]
    losses = held_out["by_corpus"]
    assert losses.keys() == {"words", "code"}
    assert min(losses.values()) < held_out["loss"] < max(losses.values())

    restarted = train(mixture, "seed=1", "data.on_mismatch=restart", "train.steps=6")
    assert "data stream starts over" in restarted.stdout
    counted = [r["corpus_tokens"] for r in restarted.records("train")]
    assert [sum(tokens.values()) for tokens in counted] == [256 * step for step in range(1, 7)]
    assert counted[5]["code"] >= counted[3]["code"]

    refused = train(f"data.corpus={paths[0]}", "data.text_field=nope", "name=other", status=1)
    remedy = "line 1 has no key 'nope'; it has body. Name its text with data.text_field"
    assert remedy in refused.stderr
