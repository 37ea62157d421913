"""`sparsellm bench token-order`: its unions are those of the sorted pattern."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from sparsellm import cli
from sparsellm.analyze.trace import Trace, load_traces
from sparsellm.bench import order_study
from sparsellm.bench.listing import listing
from sparsellm.bench.record import read
from sparsellm.ffn.token_order import token_order


def test_the_key_that_is_used_has_the_unions_of_the_sorted_pattern():
    generator = np.random.default_rng(0)
    ids_BT = (generator.random((4, 100)) ** 3 * 40).astype(np.int64)
    # An id fires neurons of its own, and some more.
    fired = generator.random((400, 300)) < 0.01
    fired |= (ids_BT.reshape(-1, 1) * 7 + np.arange(300)) % 300 < 4
    trace = Trace(fired.sum(1).astype(np.uint16), fired.nonzero()[1].astype(np.uint16), 300)
    found = {each[0].case["key"]: each for each in order_study.run([trace, trace], ids_BT, "t")}

    def union(token_M):
        blocks = np.split(fired[token_M], range(64, 400, 64))
        return np.mean([block.any(0).sum() for block in blocks])

    natural, used = (
        found["none: the order of the text"],
        found["16 early, frequency, id"],
    )
    assert natural[0].value == pytest.approx(union(np.arange(400)))
    ours = token_order(torch.from_numpy(ids_BT), 40).token_M.numpy()
    assert used[0].value == pytest.approx(union(ours))
    assert [m.metric for m in used] == ["layer 0", "layer 1", "mean"]
    assert used[-1].ratio == pytest.approx(natural[-1].value / used[-1].value)
    assert used[-1].ratio > 1.2
    assert all(m.case["tokens"] == 400 for m in used)


def test_the_command_prints_and_records(traces, ids, tmp_path, capsys):
    out = tmp_path / "results.jsonl"
    command = ["bench", "token-order", "--traces", str(traces), "--neurons", "256"]
    assert cli.main(command) == 1
    assert "has no token ids; give --ids FILE" in capsys.readouterr().err
    command += ["--ids", str(ids), "--record", str(out)]
    assert cli.main(command) == 0
    assert "16 early, frequency, id" in capsys.readouterr().out
    assert {json.loads(line)["unit"] for line in out.read_text().splitlines()} == {"neurons"}
    assert "## token_order" in listing(read(out))
    np.save(ids, np.zeros((3, 7), int))
    assert cli.main(command) == 1
    assert "21 ids do not belong to a trace of 200 tokens" in capsys.readouterr().err
    assert load_traces(traces, 256)[0].num_tokens == 200
