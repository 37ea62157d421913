#!/bin/sh
# Question: a Llama with ReLU has neurons that fire only in some texts, here for half of the vocabulary. It is quantised to
#   4 bits by llm-compressor's GPTQModifier(scheme="W4A16"), and the calibration text has the other half. What becomes of
#   the weights that lead out of these neurons?
# Guess: they are rounded to the nearest, as nothing is known about their inputs.
# Seen (llm-compressor 0.14.0.1, torch 2.14.0): they become zero, all of them, and the neurons are gone. GPTQ sets the
#   weights of inputs that were always zero to zero (as its first implementation did), since that does not change the
#   error on the calibration text. On the other half of the vocabulary, the error of the layers' outputs is 100%; rounding
#   to nearest (QuantizationModifier) has about 20% to 40%. There is no message. SparseGPTModifier has the same lines.
# Hurts: sparse models, the more the sparser: a neuron for code, for another language or for rare names need not fire in the
#   few hundred texts of a calibration, and perplexity on text like that of the calibration shows nothing.
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
from llmcompressor.modifiers.quantization import QuantizationModifier
from loguru import logger
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

VOCABULARY, TOKENS, ROWS, NEURONS = 256, 64, 32, 512
torch.manual_seed(0)
logger.remove()  # llm-compressor's, which has a line per matrix


def save_model(folder):
    """A Llama with ReLU, in which the first half of the neurons fires for tokens of the second half of the vocabulary."""
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=VOCABULARY, hidden_size=128, intermediate_size=NEURONS, num_hidden_layers=2,
                    num_attention_heads=4, num_key_value_heads=4, hidden_act="relu")
    )  # fmt: skip
    with torch.no_grad():  # feature 0 says to which half a token belongs, and these neurons read it
        embedding = model.get_input_embeddings().weight
        embedding[: VOCABULARY // 2, 0], embedding[VOCABULARY // 2 :, 0] = -0.1, 0.1
        for layer in model.model.layers:
            layer.mlp.gate_proj.weight[: NEURONS // 2, 0] = 1.0
            layer.self_attn.o_proj.weight[0] = 0.0
    model.save_pretrained(folder)
    words = Tokenizer(models.WordLevel({str(token): token for token in range(VOCABULARY)}, unk_token="0"))
    PreTrainedTokenizerFast(tokenizer_object=words, pad_token="0").save_pretrained(folder)
    return model


@torch.no_grad()
def feedforward(model, tokens):
    """The inputs of the down projections, and the outputs, of both layers."""
    seen = []
    hook = lambda module, inputs, output: seen.append((inputs[0].flatten(0, 1), output))  # noqa: E731
    handles = [layer.mlp.down_proj.register_forward_hook(hook) for layer in model.model.layers]
    model(tokens)
    for handle in handles:
        handle.remove()
    return seen


model = save_model("model")
texts = {"first": torch.randint(0, VOCABULARY // 2, (ROWS, TOKENS))}
texts["second"] = texts["first"] + VOCABULARY // 2
expected = {half: feedforward(model, tokens) for half, tokens in texts.items()}
silent = [(inputs == 0).all(0) for inputs, _ in expected["first"]]
print("neurons that are silent in the calibration text:", [int(layer.sum()) for layer in silent], "of", NEURONS)
data = Dataset.from_dict({"input_ids": texts["first"].tolist(), "attention_mask": [[1] * TOKENS] * ROWS})
erased, errors = {}, {}
for modifier in (QuantizationModifier, GPTQModifier):
    quantised = oneshot(
        model="model", dataset=data, max_seq_length=TOKENS, num_calibration_samples=ROWS,
        recipe=[modifier(targets="Linear", scheme="W4A16", ignore=["lm_head"])],
    )  # fmt: skip
    name = modifier.__name__
    weights = [layer.mlp.down_proj.weight for layer in quantised.model.layers]
    erased[name] = [(weight[:, gone] == 0).float().mean().item() for weight, gone in zip(weights, silent)]
    for half, tokens in texts.items():
        pairs = zip(feedforward(quantised, tokens), expected[half])
        errors[name, half] = [((output - right).norm() / right.norm()).item() for (_, output), (_, right) in pairs]
    print(f"{name}: zeros among the silent neurons' weights", *(f"{share:.1%}" for share in erased[name]))
    for half in texts:
        print(f"  error of the two layers on the {half} half:", *(f"{error:.0%}" for error in errors[name, half]))
assert min(layer.sum() for layer in silent) > 200
assert max(erased["QuantizationModifier"]) < 0.2 and max(errors["QuantizationModifier", "second"]) < 0.5
assert min(erased["GPTQModifier"]) == 1 and min(errors["GPTQModifier", "second"]) > 0.9, "the behaviour has changed"
PY
