#!/bin/sh
# Question: lighteval reports a standard error beside each score. For corpus metrics (BLEU, chrF, TER, F1, perplexities) it
#   resamples the answers 1,000 times. Is that the standard error, as for accuracies?
# Guess: yes, to 10%. The standard deviation of the resampled scores is the standard error.
# Seen (lighteval 0.13.0): it is 32 times too small, by sqrt(1000): the standard deviation is divided by the square root of
#   the number of resamples once more. For the share of right answers among 1,000, the standard error is 1.58%; for the same
#   share as a function that lighteval does not know as a mean, it reports 0.05%. More resamples make it smaller still.
# Hurts: comparisons of models by such metrics: differences of pure noise are ten standard errors. Multiply the reported
#   error by sqrt(1000), or resample the saved details.
# Packages: torch is a large download. To use an existing Python that has them, set PYTHON=…
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile lighteval==0.13.0
fi
cat > "$dir/stderr.py" <<'PY'
import numpy as np
from lighteval.metrics.utils.stderr import get_stderr_function


def share(answers):
    return sum(answers) / len(answers)


def main():
    generator = np.random.default_rng(0)
    answers = generator.integers(0, 2, 1000).tolist()
    right = get_stderr_function(np.mean)(answers)
    resampled = np.std([share(generator.choice(answers, 1000)) for _ in range(1000)])
    seen = get_stderr_function(share, number_experiments=1000)(answers)
    more = get_stderr_function(share, number_experiments=4000)(answers)
    print(f"share of 1,000 answers: standard error {right:.5f}, standard deviation of resampled shares {resampled:.5f}; "
          f"lighteval's for a corpus metric {seen:.5f}, with 4,000 resamples {more:.5f}")
    assert abs(resampled / right - 1) < 0.1
    assert 30 < right / seen < 34 and 1.8 < seen / more < 2.2, "the behaviour has changed"


if __name__ == "__main__":
    main()
PY
LIGHTEVAL_DISABLE_TQDM=1 HF_HUB_OFFLINE=1 "$PYTHON" "$dir/stderr.py"
