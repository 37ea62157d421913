#!/bin/sh
# Question: the model builder of onnxruntime-genai exports a small Llama with a vocabulary of 256 bytes (or 4,096 tokens) to
#   ONNX. Are its logits those of transformers?
# Guess: yes; it walks through the layers by their classes and names.
# Seen (onnxruntime-genai 0.18.0, transformers 5.23.0, fp32, CPU): only if no linear layer has as many outputs as the
#   vocabulary has tokens. The builder takes a linear layer for the head by that number alone. So where the queries of all
#   heads or the FFN are as wide as the vocabulary, the head is made at the first such layer, and reads what that layer
#   reads: the logits are those of a model that ends within its first layer, 2 to 4 nats off. The file loads and runs, and
#   nothing warns. With one token more in the vocabulary, all is right.
# Hurts: byte-level and small-vocabulary research models, whose sizes are powers of two like those of the layers.
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
from transformers import LlamaConfig, Qwen3Config

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


cases = {  # and the vocabulary with as many tokens as a layer has outputs
    "Llama, 4 heads of 64": (LlamaConfig, 256, dict(hidden_size=128, head_dim=64, intermediate_size=384)),
    "Llama, as wide as its vocabulary": (LlamaConfig, 256, dict(hidden_size=256, intermediate_size=640)),
    "Llama, 4,096 neurons": (LlamaConfig, 4096, dict(hidden_size=128, intermediate_size=4096)),
    "Qwen3, 4 heads of 64": (Qwen3Config, 256, dict(hidden_size=128, head_dim=64, intermediate_size=384)),
}
for name, (kind, vocabulary, options) in cases.items():
    seen = [error(kind, name, size, num_key_value_heads=2, **options) for size in (vocabulary, vocabulary + 1)]
    print(f"{name}: {vocabulary} tokens {seen[0]:.4f} nats off, {vocabulary + 1} tokens {seen[1]:.4f}")
    assert seen[1] < 1e-3
    assert seen[0] > 1, "the behaviour has changed"
PY
