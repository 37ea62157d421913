#!/bin/sh
# Question: llm-compressor's SparseGPTModifier and WandaPruningModifier take the arguments that its quantising modifiers are
#   usually given, targets="Linear" and ignore=["lm_head"]. What is pruned?
# Guess: all linear layers but the head, as GPTQModifier(targets="Linear", ignore=["lm_head"]) quantises all but the head.
# Seen (llm-compressor 0.14.0.1, torch 2.14.0): with targets="Linear", nothing, though a string is allowed: it is read
#   letter by letter, and no layer is called L. The run ends as usual. With the default, targets=["Linear"], everything,
#   the head too: names of layers get a dot at the end ("lm_head."), so that a name in ignore matches none, and the warning
#   about a head that is pruned never comes. ignore=["re:.*lm_head"] keeps the head.
# Hurts: pruned models whose head is pruned as well, which it is not meant to be, and models that are not pruned at all.
# Packages: torch is a large download. To use an existing Python that has them, set PYTHON=…
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile torch==2.14.0 numpy==2.4.6 transformers==5.17.0 datasets==5.2.0 \
    accelerate==1.15.0 compressed-tensors==0.19.0 llmcompressor==0.14.0.1
fi
cd "$dir"
HF_HUB_OFFLINE=1 "$PYTHON" -W ignore - 2>"$dir/log" <<'PY' || { tail -n 20 "$dir/log"; exit 1; }
import torch
from datasets import Dataset
from llmcompressor import oneshot
from llmcompressor.modifiers.gptq import GPTQModifier
from llmcompressor.modifiers.pruning import SparseGPTModifier, WandaPruningModifier
from loguru import logger
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

VOCABULARY, TOKENS, ROWS = 256, 64, 32
torch.manual_seed(0)
logger.remove()  # llm-compressor's, which has a line per matrix
messages = []
logger.add(lambda message: messages.append(str(message)), level="WARNING")
model = LlamaForCausalLM(
    LlamaConfig(vocab_size=VOCABULARY, hidden_size=128, intermediate_size=256, num_hidden_layers=2,
                num_attention_heads=4, num_key_value_heads=4)
)  # fmt: skip
model.save_pretrained("model")
words = Tokenizer(models.WordLevel({str(token): token for token in range(VOCABULARY)}, unk_token="0"))
PreTrainedTokenizerFast(tokenizer_object=words, pad_token="0").save_pretrained("model")
rows = torch.randint(0, VOCABULARY, (ROWS, TOKENS)).tolist()
data = Dataset.from_dict({"input_ids": rows, "attention_mask": [[1] * TOKENS] * ROWS})
original = {name: weight.clone() for name, weight in model.named_parameters()}
seen = {}


def report(text, modifier, share):
    """Prints which share of the weights of the layers, and of the head, `share` finds."""
    changed = oneshot(model="model", dataset=data, max_seq_length=TOKENS, num_calibration_samples=ROWS, recipe=[modifier])
    names = [name for name, module in changed.named_modules() if isinstance(module, torch.nn.Linear)]
    shares = {name: share(changed.get_submodule(name).weight, original[f"{name}.weight"]) for name in names}
    head = shares.pop("lm_head")
    seen[text] = min(shares.values()), head
    print(f"{text}: at least {seen[text][0]:.0%} of each layer, {head:.0%} of the head")


report(
    'GPTQ targets="Linear", quantised',
    GPTQModifier(scheme="W4A16", targets="Linear", ignore=["lm_head"]),
    lambda weight, old: (weight != old).float().mean().item(),
)
for modifier in (SparseGPTModifier, WandaPruningModifier):
    name = modifier.__name__.removesuffix("Modifier")
    for targets, ignore in (("Linear", "lm_head"), (["Linear"], "lm_head"), (["Linear"], "re:.*lm_head")):
        text = f"{name} targets={targets}, ignore={[ignore]}, pruned"
        pruner = modifier(sparsity=0.5, mask_structure="2:4", targets=targets, ignore=[ignore])
        report(text, pruner, lambda weight, old: (weight == 0).float().mean().item())
assert not [message for message in messages if "head" in message]
gptq, *pruned = seen.values()
assert gptq[0] > 0.9 and gptq[1] == 0
for whole, ignored, pattern in (pruned[:3], pruned[3:]):
    assert pattern == (0.5, 0)
    assert whole == (0, 0) and ignored == (0.5, 0.5), "the behaviour has changed"
PY
