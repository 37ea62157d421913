#!/bin/sh
# Question: a model answers "yes" and "no" where the references are "yes" and "no". What is torchmetrics' chrF++ of these
#   right answers, and is it sacrebleu's, which its documentation says it follows?
# Guess: 100, as any score of equal texts; and yes, to rounding.
# Seen (torchmetrics 1.9.0, sacrebleu 2.6.0): 50; for the answer "a" it is 25, for "Paris" 75. sacrebleu gives 100 by
#   default. chrF is a mean over n-grams of one to six characters and one or two words, and torchmetrics counts an order for
#   which a text is too short as 0, where sacrebleu leaves it out; so torchmetrics gives what eps_smoothing=True gives in
#   sacrebleu, as the first program for chrF++ did, and has no option for the other. One longer text in the corpus hides it:
#   the orders are those of the whole corpus, and the scores agree to 0.1 points. Scores of single sentences do not: of 200
#   sentences of 1 to 14 words with errors, the mean is 66.0 instead of 68.8.
# Hurts: chrF of short answers, words and names, where a perfect model has 25 to 75, and of sentences
#   (return_sentence_level_score=True), which decide which examples are looked at or kept. BLEU, TER and WER agree.
# Packages: torch is a large download. To use an existing Python that has them, set PYTHON=…
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile torchmetrics==1.9.0 torch==2.13.0 sacrebleu==2.6.0 regex==2026.11.19 \
    numpy==2.4.6
fi
"$PYTHON" -W ignore - <<'PY'
import importlib.metadata
import random

import sacrebleu
from torchmetrics.functional.text import chrf_score, sacre_bleu_score

print(", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("torchmetrics", "sacrebleu")))
random.seed(0)
words = "the cat sat on a mat and it saw an old grey house near a river with two boats".split()
references = [" ".join(random.choices(words, k=random.randrange(1, 15))) for _ in range(200)]
answers = []
for reference in references:
    answer = reference.split()
    for _ in range(random.randrange(4)):
        answer[random.randrange(len(answer))] = random.choice(words)
    answers.append(" ".join(answer))
cases = {
    "yes, no": (["yes", "no"], ["yes", "no"]),
    "a": (["a"], ["a"]),
    "Paris": (["Paris"], ["Paris"]),
    "a sentence": (["the cat sat on the mat"], ["the cat sat on the mat"]),
    "yes, no, a sentence": (["yes", "no", references[0] * 2], ["yes", "no", references[0] * 2]),
    "200 sentences": (answers, references),
}
seen = {}
for name, (given, right) in cases.items():
    mean, each = chrf_score(given, [[text] for text in right], return_sentence_level_score=True)
    other = sacrebleu.corpus_chrf(given, [right], word_order=2).score
    others = [sacrebleu.sentence_chrf(a, [b], word_order=2).score for a, b in zip(given, right)]
    seen[name] = 100 * mean.item(), other, 100 * each.mean().item(), sum(others) / len(others)
    print(f"{name}: torchmetrics {100 * mean.item():.2f}, sacrebleu {other:.2f}; by sentence, the mean is "
          f"{seen[name][2]:.2f} and {seen[name][3]:.2f}")
bleu = 100 * sacre_bleu_score(answers, [[text] for text in references]).item()
print(f"200 sentences, BLEU: torchmetrics {bleu:.2f}, sacrebleu {sacrebleu.corpus_bleu(answers, [references]).score:.2f}")
assert abs(seen["a sentence"][0] - 100) < 0.01
for name, score in (("yes, no", 50), ("a", 25), ("Paris", 75)):
    assert abs(seen[name][0] - score) < 1 and abs(seen[name][1] - 100) < 0.01, "the behaviour has changed"
    smoothed = sacrebleu.corpus_chrf(cases[name][0], [cases[name][1]], word_order=2, eps_smoothing=True).score
    assert abs(seen[name][0] - smoothed) < 0.01
_, _, mean, other = seen["200 sentences"]
assert mean < other - 1, "the scores of sentences agree now"
PY
