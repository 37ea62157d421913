#!/bin/sh
# Question: a model of transformers has the scaled RoPE of Llama 3.1 to 3.3 (rope_type "llama3", factor 32). It is
#   converted by CTranslate2, whose converter lists llama3 among the types that it supports. Are the log-probabilities
#   those of transformers?
# Guess: yes, to 1e-4 in fp32, as they are without scaling, or the converter refuses the model.
# Seen (ctranslate2 4.8.5, transformers 5.23.0, CPU, fp32): they are those of the model without scaling, to 1e-5. Its
#   type is written to the converted model, but not used. The random model below is off by up to 0.1 nats within 100
#   tokens, and by more than 1 nat within 1,000. Positions near 0 agree, so a short prompt looks right. The type "linear"
#   is right, and yarn and dynamic are refused.
# Hurts: Llama 3.1, 3.2 and 3.3 and their fine-tunes, or own models with this scaling: long prompts lose quality, and
#   perplexities differ from those of transformers. Compare the scores of a long text after a conversion.
# Packages: torch is a large download. To use an existing Python that has them, set PYTHON=…
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile ctranslate2==4.8.5 transformers==5.23.0 torch==2.13.0 numpy==2.4.6
fi
HF_HUB_OFFLINE=1 TRANSFORMERS_VERBOSITY=error HF_HUB_DISABLE_PROGRESS_BARS=1 "$PYTHON" - "$dir" <<'PY'
import string
import sys

import ctranslate2
import torch
from ctranslate2.converters import TransformersConverter
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

torch.manual_seed(0)
vocabulary = [*string.ascii_lowercase, "<s>", "</s>", "<unk>"]
tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(vocabulary)}, [], unk_token="<unk>"))
tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
tokens = torch.randint(0, 26, (1, 1000))
plain = {"rope_type": "default", "rope_theta": 5e5}
scaled = {
    "linear": {"rope_type": "linear", "rope_theta": 5e5, "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}


def make(rope):
    sizes = {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(
        vocab_size=32, max_position_embeddings=131072, rope_parameters=rope, bos_token_id=26, eos_token_id=27, **sizes
    )
    return LlamaForCausalLM(config).eval()


@torch.no_grad()
def log_probs(model):
    return model(tokens).logits[0, :-1].log_softmax(-1).gather(-1, tokens[0, 1:, None])[:, 0]


seen = {}
for name, rope in {"default": plain, **scaled}.items():
    model, unscaled = make(rope), make(plain)
    for parameter in model.parameters():
        if parameter.ndim == 2:
            parameter.data *= 6
    unscaled.load_state_dict(model.state_dict())
    folder = f"{sys.argv[1]}/{name}"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    TransformersConverter(folder).convert(f"{folder}-ct2")
    generator = ctranslate2.Generator(f"{folder}-ct2", compute_type="float32")
    scores = generator.score_batch([[vocabulary[i] for i in tokens[0].tolist()]])[0].log_probs
    errors = [(torch.tensor(scores) - log_probs(other)).abs() for other in (model, unscaled)]
    seen[name] = errors[0].max().item(), errors[1].max().item()
    print(f"{name}: log-probabilities differ from transformers' by up to {errors[0][:100].max():.1e} within 100 tokens, "
          f"{seen[name][0]:.1e} within 1,000; from those without scaling by {seen[name][1]:.1e}")
assert seen["default"][0] < 1e-4 and seen["linear"][0] < 1e-4 and seen["linear"][1] > 0.1
assert seen["llama3"][0] > 0.5 and seen["llama3"][1] < 1e-4, "the behaviour has changed"
PY
