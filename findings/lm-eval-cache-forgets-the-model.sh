#!/bin/sh
# Question: lm-eval's --use_cache FILE stores a model's answers, so that a run can continue or gain a task. Two
#   checkpoints are scored with the same FILE, one after the other. What are the scores of the second?
# Guess: its own. The key of an answer includes the model's arguments, or the file belongs to one model.
# Seen (lm_eval 0.4.13): those of the first. The key holds the kind of request, the prompt and the answer, but nothing
#   of the model. Four models with random weights get four different scores without the cache, and the first one's with
#   it. There is no warning. This has been reported to lm-eval's authors.
# Hurts: loops over the checkpoints of a run, over runs or over quantisations with one --use_cache: every row of the
#   table repeats the first. Give each model its own file.
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
import sys
from pathlib import Path

import lm_eval
import torch
from lm_eval.models.huggingface import HFLM
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

logging.disable(logging.WARNING)
folder = Path(sys.argv[1])
rows = [{"text": pair, "answer": i % 3} for i, pair in enumerate(("a b", "b c", "c a", "a c", "b a", "c b"))]
(folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
task = {
    "task": "letters",
    "dataset_path": "json",
    "dataset_kwargs": {"data_files": {"test": str(folder / "rows.jsonl")}, "cache_dir": str(folder)},
    "test_split": "test",
    "output_type": "multiple_choice",
    "doc_to_text": "{{text}}",
    "doc_to_choice": ["a", "b", "c"],
    "doc_to_target": "{{answer}}",
    "metric_list": [{"metric": "acc"}],
}
words = {word: i for i, word in enumerate(("</s>", "a", "b", "c", "?"))}
own = Tokenizer(models.WordLevel(words, unk_token="?"))
own.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=own, eos_token="</s>", unk_token="?")
sizes = {"vocab_size": 8, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}


def first_likelihood(seed, cache):
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, max_position_embeddings=32))
    lm = HFLM(pretrained=model, tokenizer=tokenizer, device="cpu", batch_size=1)
    results = lm_eval.simple_evaluate(lm, tasks=[task], use_cache=cache, bootstrap_iters=0)
    return results["samples"]["letters"][0]["resps"][0][0][0], results["results"]["letters"]["acc,none"]


seen = {}
for cache in (None, str(folder / "cache")):
    seen[cache] = [first_likelihood(seed, cache) for seed in range(4)]
    for seed, (likelihood, accuracy) in enumerate(seen[cache]):
        print(f"model {seed}, {'with' if cache else 'without'} cache: first log-likelihood {likelihood:.4f}, "
              f"accuracy {accuracy:.2f}")
alone, cached = seen.values()
assert len({likelihood for likelihood, _ in alone}) == 4
assert cached == [alone[0]] * 4, "the behaviour has changed"
PY
