"""A few lines of text at the end of a training, for its terminal and its report."""

import sys
from pathlib import Path

from sparsellm.waiting import waiting


def write_sample(run_path: Path, steps: int) -> None:
    """Prints what the model of a finished run of ``steps`` writes by itself, and saves it there.

    It is read from the last checkpoint, so that it touches nothing of the training. Does nothing
    without a checkpoint of the last step, or if it has been sampled already.
    """
    from sparsellm.report.collect import SAMPLE_FILE, Sample
    from sparsellm.runs.checkpoint import latest, step_name
    from sparsellm.runs.files import write_atomically

    newest, file = latest(run_path / "checkpoints"), run_path / SAMPLE_FILE
    if newest is None or newest.name != step_name(steps):
        return
    if file.is_file() and file.stat().st_mtime >= newest.stat().st_mtime:
        return
    try:
        with waiting("reading the checkpoint for a sample of text"):
            from sparsellm.device import default_dtype, pick_device
            from sparsellm.generate import generate, show
            from sparsellm.runs.pretrained import load_pretrained

            device = pick_device(None)
            pretrained = load_pretrained(newest, device, default_dtype(device))
        pieces: list[str] = []

        def write(piece: str) -> None:
            pieces.append(piece)
            show(piece)

        print("what the model writes by itself:")
        report = generate(pretrained, "", write)
        print(f"\n{report.line(pretrained.recipe.model.intermediate_size)}", flush=True)
        found = Sample(step=steps, text="".join(pieces))
        write_atomically(file, found.model_dump_json() + "\n")
    except (ValueError, OSError, RuntimeError) as error:  # such as a GPU without memory for it
        print(f"no sample of text: {error}", file=sys.stderr, flush=True)
