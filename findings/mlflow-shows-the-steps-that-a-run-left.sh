#!/bin/sh
# Question: a run logs its loss to MLflow by step, up to step 20, where it is 1.0. It goes back to step 10 and logs steps
#   10 to 14 again, where it is 0.5. Which loss does the run have, run.data.metrics["loss"], as in the table of runs and
#   in search_runs?
# Guess: 0.5, the last that was logged. Its documentation says that the value with the latest timestamp is returned.
# Seen (mlflow 3.17.2, SQLite): 1.0, from the steps that the run left: the largest step comes first, and only then the
#   time. Of several values of one step and time, the largest is shown: a batch of 5, 7 and 6 shows 7. The run shows its
#   old loss until it has passed step 20.
# Hurts: whoever sorts or filters runs, chooses a checkpoint or stops a search by these values after a rollback or a
#   restart from an older checkpoint: a run that recovered looks diverged, and one that diverged looks well. Read the
#   history of the metric, and take the last by time.
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile mlflow==3.17.2
fi
"$PYTHON" -W ignore - "$dir" 2>"$dir/log" <<'PY' || { cat "$dir/log"; exit 1; }
import sys
import time

import mlflow
from mlflow.entities import Metric

mlflow.set_tracking_uri(f"sqlite:///{sys.argv[1]}/mlflow.db")
mlflow.set_experiment("finding")
client = mlflow.MlflowClient()
with mlflow.start_run() as run:
    for step in range(21):
        mlflow.log_metric("loss", 3 - step / 10, step=step)
    time.sleep(0.1)
    for step in range(10, 15):  # goes back to step 10
        mlflow.log_metric("loss", 0.5, step=step)
    now = int(time.time() * 1000)
    client.log_batch(run.info.run_id, metrics=[Metric("batch", value, now, 0) for value in (5.0, 7.0, 6.0)])
shown = mlflow.get_run(run.info.run_id).data.metrics
found = mlflow.search_runs()["metrics.loss"][0]
history = client.get_metric_history(run.info.run_id, "loss")
last = max(history, key=lambda metric: metric.timestamp)
print(f"shown {shown}; search_runs {found}; last by time: {last.value} at step {last.step}")
assert last.value == 0.5
assert shown["loss"] == found == 1.0 and shown["batch"] == 7.0, "the behaviour has changed"
PY
