"""Records steps of a run that has wandb: ``wandb_worker.py RUN_DIR MODE FIRST LAST END``.

With ``kill`` as END it ends by SIGKILL, with wandb's process, once all is logged.
"""

import os
import signal
import sys
import time

import psutil

from sparsellm.recipe import load_recipe
from sparsellm.runs.telemetry.metrics_log import MetricsLog
from sparsellm.runs.telemetry.records import (
    FailureRecord,
    SessionRecord,
    TrainRecord,
    ValidationRecord,
)

if __name__ == "__main__":
    run_dir, mode, first, last, end = sys.argv[1:]
    recipe = load_recipe("debug", [f"logging.run_dir={run_dir}", f"logging.wandb={mode}"])
    resumed = int(first) - 1
    log = MetricsLog(recipe, resumed, SessionRecord(resumed, started_at=time.time()))
    for step in range(int(first), int(last) + 1):
        log.write(TrainRecord(step, 256 * step, {"loss": 5.0 / step}))
        if step % 2 == 0:
            log.write(ValidationRecord(step, 256 * step, 4.0 / step, num_targets=512))
    for key in ("step", "target"):
        log.write(FailureRecord(int(last), 256 * int(last), key, "of the same step"))
    if end == "kill":
        while log._dashboard._sent.get("failure/target") != int(last):
            time.sleep(0.02)
        for process in psutil.Process().children(recursive=True):
            process.kill()
        os.kill(os.getpid(), signal.SIGKILL)
    log.close("finished")
