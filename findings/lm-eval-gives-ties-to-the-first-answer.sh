#!/bin/sh
# Question: in BLiMP, a model chooses between two sentences, and the right one is always listed first. What does lm-eval
#   score a bf16 model with random weights? And a model whose logits are NaN?
# Guess: 50%, as in fp32, since bf16 makes a tie in under 1% of the pairs; NaN is an error, or 0%.
# Seen (lm_eval 0.4.13): 66% on 400 pairs that differ in one word, against 50% in fp32. lm-eval computes the log-softmax
#   and its sum over a sentence in the model's dtype. Around -61, bf16 numbers are 0.25 apart, and 35% of the pairs tie.
#   A tie goes to the first sentence, the right one. Logits that are all equal or NaN score 100%.
#   softmax_dtype=float32 removes the ties that come from rounding.
# Hurts: BLiMP, TruthfulQA (mc1) and other tasks that list the right answer first. Weak and broken models score too well
#   in bf16, the default for checkpoints in bf16, and the gain shrinks as the model improves. Elsewhere ties are noise.
# Packages: torch is a large download. To use an existing Python that has them, set PYTHON=…
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile torch==2.13.0 transformers==5.23.0 tokenizers==0.23.3 'lm_eval[hf]==0.4.13'
fi
"$PYTHON" - "$dir" <<'PY'
import json
import logging
import random
import sys
from pathlib import Path

import lm_eval
import torch
from lm_eval.models.huggingface import HFLM
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

logging.disable(logging.WARNING)
random.seed(0)
words = [f"w{i}" for i in range(2000)]
rows = []
for _ in range(400):
    good = random.choices(words, k=8)
    bad = list(good)
    bad[random.randrange(2, 8)] = random.choice(words)
    rows.append({"sentence_good": " ".join(good), "sentence_bad": " ".join(bad)})
file = Path(sys.argv[1], "pairs.jsonl")
file.write_text("\n".join(map(json.dumps, rows)))
task = {
    "task": "pairs",
    "dataset_path": "json",
    "dataset_kwargs": {"data_files": {"train": str(file)}, "cache_dir": sys.argv[1]},
    # As in lm-eval's own file for BLiMP.
    "output_type": "multiple_choice",
    "validation_split": "train",
    "doc_to_text": "",
    "doc_to_target": 0,
    "doc_to_choice": "{{[sentence_good, sentence_bad]}}",
    "metric_list": [{"metric": "acc"}],
}
own = Tokenizer(models.WordLevel({word: i for i, word in enumerate(["</s>", *words])}, unk_token="</s>"))
own.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=own, eos_token="</s>", unk_token="</s>")
sizes = {"vocab_size": 2048, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}


def score(name, prepare, **options):
    """Accuracy, and the share of pairs with equal log-likelihoods."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2))
    prepare(model)
    lm = HFLM(pretrained=model, tokenizer=tokenizer, device="cpu", batch_size=16, **options)
    results = lm_eval.simple_evaluate(lm, tasks=[task], bootstrap_iters=0)
    pairs = [[answer[0][0] for answer in row["resps"]] for row in results["samples"]["pairs"]]
    accuracy = results["results"]["pairs"]["acc,none"]
    ties = sum(good == bad for good, bad in pairs) / len(pairs)
    print(f"{name}: accuracy {100 * accuracy:.1f}%, {100 * ties:.1f}% ties")
    return accuracy, ties


fp32 = score("random weights, fp32", lambda model: None)
bf16 = score("random weights, bf16", lambda model: model.bfloat16())
mended = score("the same, softmax_dtype=float32", lambda model: model.bfloat16(), softmax_dtype="float32")
zero = score("output head of zeros", lambda model: model.lm_head.weight.data.zero_())
nan = score("a NaN", lambda model: model.model.norm.weight.data.fill_(torch.nan))
assert all(0.45 < accuracy < 0.58 and ties < 0.02 for accuracy, ties in (fp32, mended))
assert bf16[0] > 0.65 and bf16[1] > 0.25 and zero[0] == nan[0] == 1, "the behaviour has changed"
PY
