#!/bin/sh
# Question: the model builder of onnxruntime-genai, which has a class for OLMo, exports one to ONNX; and a Llama whose RoPE
#   is scaled linearly, as many long-context fine-tunes are. Are the logits those of transformers?
# Guess: yes, or the builder refuses an option that it does not know.
# Seen (onnxruntime-genai 0.18.0, transformers 5.23.0, fp32, CPU, small random models): no. OLMo has LayerNorms without
#   weights, and the builder writes RMS norms: the worst log-probability of each token is 0.5 nats off. The option clip_qkv
#   is dropped too, and so is RoPE's factor of type "linear" (0.5 nats). A plain Llama and RoPE of type "llama3" are right
#   to 1e-4. Nothing warns.
# Hurts: exports of these models for CPUs and devices: text that is fluent at best, and scores that are wrong.
# Packages: torch is a large download. To use an existing Python that has them, set PYTHON=…
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile torch==2.13.0 transformers==5.23.0 onnxruntime-genai==0.18.0 \
    onnxruntime==1.32.0 onnx==1.23.2 onnx-ir==1.1.0 numpy==2.4.6
fi
CUDA_VISIBLE_DEVICES= HF_HUB_OFFLINE=1 "$PYTHON" -W ignore - "$dir" 2>"$dir/log" <<'PY' || { tail "$dir/log"; exit 1; }
import contextlib
import io
import sys

import numpy as np
import onnxruntime_genai
import torch
import transformers
from onnxruntime_genai.models.builder import create_model, parse_extra_options
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, OlmoConfig

TOKENS = 24


def error(kind, name, vocabulary, **options):
    """The largest difference of the log-probabilities at each of the text's tokens, averaged, in nats."""
    torch.manual_seed(0)
    config = kind(vocab_size=vocabulary, num_hidden_layers=3, num_attention_heads=4, bos_token_id=1, eos_token_id=2,
                  pad_token_id=0, max_position_embeddings=128, **options)  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.mul_(3)
        tokens = torch.randint(3, vocabulary, (1, TOKENS))
        right = model(tokens).logits[0].float().log_softmax(-1)
    folder, target = (f"{sys.argv[1]}/{name} {vocabulary}{end}" for end in ("", " exported"))
    model.save_pretrained(folder)
    words = Tokenizer(models.WordLevel({str(token): token for token in range(vocabulary)}, unk_token="0"))
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="0").save_pretrained(folder)
    arguments = None, folder, target, "fp32", "cpu", folder + " cache"
    with contextlib.redirect_stdout(io.StringIO()):
        create_model(*arguments, **parse_extra_options(*arguments, []))
    exported = onnxruntime_genai.Model(target)
    settings = onnxruntime_genai.GeneratorParams(exported)
    settings.set_search_options(max_length=64)
    generator = onnxruntime_genai.Generator(exported, settings)
    logits = []
    for token in tokens[0].tolist():
        generator.append_tokens(np.array([[token]], np.int32))
        logits.append(torch.tensor(np.array(generator.get_logits()).reshape(-1)))
    return float((torch.stack(logits).log_softmax(-1) - right).abs().amax(1).mean())


def rope(**options):
    return dict(rope_parameters=dict(rope_theta=1e4, **options))


llama3 = dict(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16)
cases = {  # and whether the export must be right
    "Llama": (LlamaConfig, {}, True),
    "Llama, RoPE of type llama3": (LlamaConfig, rope(rope_type="llama3", **llama3), True),
    "Llama, RoPE of type linear": (LlamaConfig, rope(rope_type="linear", factor=4.0), False),
    "OLMo": (OlmoConfig, {}, False),
    "OLMo, clip_qkv": (OlmoConfig, dict(clip_qkv=0.5), False),
}
seen = {}
for name, (kind, options, right) in cases.items():
    seen[name] = error(kind, name, 300, hidden_size=128, intermediate_size=384, num_key_value_heads=2, **options)
    print(f"{name}: {seen[name]:.4f} nats off")
    assert seen[name] < 1e-3 if right else seen[name] > 0.2, "the behaviour has changed"
assert seen["OLMo, clip_qkv"] > 1.5 * seen["OLMo"], "the behaviour has changed"
PY
