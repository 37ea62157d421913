"""The controller under FSDP2: two ranks on a CPU, with accumulation and recomputation."""

import json
from pathlib import Path

import pytest
from warm import ranks

WORKER = Path(__file__).with_name("sharded_worker.py")


@pytest.mark.slow
def test_sharded_gradients_and_counts_are_those_of_the_whole_batch(tmp_path):
    out = tmp_path / "found.json"
    ranks(2, str(WORKER), str(out))
    for outcome in json.loads(out.read_text()):
        assert outcome["error"] < 1e-5
        assert outcome["nnz"] == pytest.approx(outcome["expected_nnz"])
        assert outcome["tokens"] == 160
