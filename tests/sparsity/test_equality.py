"""A loop of one's own with `SparsityController` trains as our loop does, on the same data."""

import json
from pathlib import Path

import pytest
from warm import ranks

from sparsity import equality_worker

WORKER = Path(equality_worker.__file__)
EXACT = ("nnz", "p50", "p99", "max", "dead", "sparse")


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_gradients_statistics_and_lambda_equal_those_of_our_loop(
    tiny_overrides, tmp_path, num_ranks
):
    common = [
        *tiny_overrides,
        "train.steps=50",
        "optimizer.clip_norm=1e6",
        "optimizer.learning_rate=0.1",
        "validation.every_steps=0",
        "runtime.compile=false",
        "sparsity.l1_coefficient=0.05",
        "sparsity.l1_zero_steps=1",
        "sparsity.target_nnz=31",  # near it, so that layers differ,
        "sparsity.target_per_layer=true",
    ]
    splits = [
        (
            f"train.micro_batch_size={8 // (num_ranks * rounds)}",
            f"runtime.precision={precision}",
            f"ffn.kernels={kernels}",
            f"runtime.token_order={order}",
        )
        for rounds in (1, 4)
        for precision, kernels, order in (("fp32", "dense", "none"), ("bf16", "sparse", "auto"))
    ]
    out = tmp_path / "found.json"
    words = [word for split in splits for word in ("--", *split)]
    if num_ranks == 1:
        equality_worker.main(str(out), *common, *words)
    else:
        ranks(num_ranks, str(WORKER), str(out), *common, *words)
    for split, outcome in zip(splits, json.loads(out.read_text()), strict=True):
        assert outcome["num_ranks"] == num_ranks
        assert outcome["rounds"] == (1 if split in splits[:2] else 4)
        # The factors by which losses are divided are powers of two here: also bf16 rounds alike.
        assert outcome["gradient_error"] < 1e-6, split
        assert outcome["silent_equal"]
        for ours, theirs in zip(outcome["ours"], outcome["others"], strict=True):
            for name in EXACT:
                assert theirs[name] == pytest.approx(ours[name], rel=1e-12), (split, name)
            for name in ("lambda", "l1", "union"):
                assert theirs[name] == pytest.approx(ours[name], rel=1e-6), (split, name)
            assert theirs["error"] == ours["error"]
        assert len(set(outcome["ours"][-1]["lambda"])) > 1
