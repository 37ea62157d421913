"""The faults of the soak: each is one session of a run, that ends, and what it must have said.

Those that need a checkpoint start nothing, and do not count, where there is none.
"""

import contextlib
import itertools
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from soak_run import TEXTS, Session, last_step

from sparsellm.runs import checkpoint
from sparsellm.runs.telemetry.records import METRICS_FILE

Ended = tuple[Session, str]  # and what was wrong
Fault = Callable[[Path, random.Random], Ended | None]
SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1")
_EARLY = 100  # by this step a run may begin anew; later it is to keep its records to the end
NO_WANDB = {"WANDB_API_KEY": "0" * 40, "WANDB_BASE_URL": "http://127.0.0.1:9"}


def undisturbed(folder: Path, chance: random.Random) -> Ended:
    """A session that meets no fault, until it is stopped."""
    return _stop(_start(folder), chance)


def _start(folder: Path, *arguments: str, **options) -> Session:
    return Session(folder, "soak", arguments=arguments, **options)


def _injected(kind: str, expected: str = "") -> Fault:
    """One that a rank meets by itself, after some steps."""

    def fault(folder: Path, chance: random.Random) -> Ended:
        rank, steps = chance.randint(0, 1), chance.randint(0, 60)
        session = _start(folder, fault=kind, rank=rank, steps=steps)
        problem = session.until_training(chance, early=0)
        if not session.wait(180):
            return session, problem or "met no fault"
        if expected and not re.search(expected, session.said):
            problem = f"did not say {expected!r}"
        return session, problem

    return fault


def _somewhere(folder: Path, chance: random.Random) -> Ended:
    """A session at a random moment, and what was wrong by then."""
    session = _start(folder)
    problem = session.until_training(chance)
    time.sleep(chance.uniform(0, 6))
    return session, problem


def _killed(who: str) -> Fault:
    def fault(folder: Path, chance: random.Random) -> Ended:
        session, problem = _somewhere(folder, chance)
        ranks = session.ranks()
        if who != "rank" or not ranks:
            session.kill_launcher()
        if who != "launcher" and ranks:
            session.signal(signal.SIGKILL, ranks if who == "all" else [chance.choice(ranks)])
        return session, problem

    return fault


def _signalled(name: str) -> Fault:
    """One rank gets it, or both."""

    def fault(folder: Path, chance: random.Random) -> Ended:
        session, problem = _somewhere(folder, chance)
        ranks = session.ranks()
        one = chance.random() < 0.5
        session.signal(getattr(signal, name), [chance.choice(ranks)] if ranks and one else ranks)
        return session, problem

    return fault


def _stop(session: Session, chance: random.Random, problem: str = "") -> Ended:
    """Ends a session that goes on in spite of its fault."""
    problem = problem or session.until_training(chance, early=0)
    if not session.alive:
        problem = problem or f"ended by itself: {session.said[-300:]}"
    time.sleep(chance.uniform(2, 5))
    session.signal(signal.SIGTERM, session.ranks())
    return session, problem


def _refused(session: Session, expected: str) -> Ended:
    if not session.wait(150):
        return session, "was not refused"
    match = re.search(expected, session.said)
    return session, "" if match and session.status else f"did not say {expected!r}"


def _differ(folder: Path, chance: random.Random) -> Ended:
    """Ranks have different recipes."""
    return _refused(
        _start(folder, fault="differ", rank=1), r"the ranks differ in the recipe's seed"
    )


def _validation(folder: Path, chance: random.Random) -> Ended:
    """A validation fails: training goes on."""
    session = _start(folder, fault="validation", rank=chance.randint(0, 1))
    problem = session.until_training(chance, early=0)
    end = time.monotonic() + 60
    while "the validation failed" not in session.said and time.monotonic() < end:
        time.sleep(0.2)
    reported = "the validation failed" in session.said
    return _stop(session, chance, problem or ("" if reported else "no validation failed"))


def _bit_flip(folder: Path, chance: random.Random) -> Ended | None:
    """Of any file of the newest checkpoint, which is moved away as the refusal advises."""
    saved, step = folder / "soak" / "checkpoints", last_step(folder / "soak")
    newest = checkpoint.latest(saved)
    if newest is None:
        return None
    file = chance.choice([path for path in sorted(newest.iterdir()) if path.stat().st_size])
    good = file.read_bytes()
    content = bytearray(good)
    content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    file.write_bytes(content)
    refused, problem = _refused(_start(folder), re.escape(str(file)))
    refused.all_end()
    if (
        f"Move {newest.name} elsewhere, and the same command resumes" in refused.said
        and not problem
    ):
        newest.rename(_unused(folder))
        return _stop(_start(folder), chance)
    if any(_is_whole(path) for path in checkpoint.checkpoints_in(saved) if path != newest):
        problem = problem or "an older checkpoint is whole, and was not offered"
    if step <= _EARLY:  # as a user would, start anew
        return _stop(_start(folder, "--fresh"), chance, problem)
    file.write_bytes(good)
    return _stop(_start(folder), chance, problem)


def _second(folder: Path, chance: random.Random) -> Ended:
    """Two trainings in one folder."""
    first = _start(folder)
    problem = first.until_training(chance, early=0)
    time.sleep(1)
    second = Session(folder, "soak")
    if not second.wait(120):
        problem = problem or "a second training was not refused"
    elif "is being trained: process " not in second.said or not second.status:
        problem = problem or "a second training was not refused by name"
    if not first.alive:
        problem = problem or "a second training ended the first"
    first.signal(signal.SIGTERM, first.ranks())
    return first, problem


def _rollback(folder: Path, chance: random.Random) -> Ended | None:
    """The newest checkpoints are moved away: the run goes on from an earlier one."""
    saved = checkpoint.checkpoints_in(folder / "soak" / "checkpoints")
    if len(saved) < 2 or not _is_whole(saved[0]):
        return None
    for path in saved[1:]:
        path.rename(_unused(folder))
    session, problem = _stop(_start(folder), chance)
    if f"resuming from {saved[0]}" not in session.said:
        problem = problem or f"did not go on from {saved[0].name}: {session.said[-300:]}"
    return session, problem


def _unused(folder: Path) -> Path:
    """A place for a checkpoint that is moved away."""
    places = (folder / f"moved-{i}" for i in itertools.count())
    return next(path for path in places if not path.exists())


def _is_whole(path: Path) -> bool:
    try:
        checkpoint.load(path)
    except (ValueError, OSError):
        return False
    return True


def _purge(folder: Path, chance: random.Random) -> Ended | None:
    """All checkpoints are gone, the records are not. Late in the soak only the oldest are."""
    folder_of, step = folder / "soak" / "checkpoints", last_step(folder / "soak")
    if not step:
        return None
    shutil.rmtree(checkpoint.checkpoints_in(folder_of)[0] if step > _EARLY else folder_of)
    session, problem = _stop(_start(folder), chance)
    if step <= _EARLY and "the records are now" not in session.said:
        problem = problem or "records were overwritten without a word"
    return session, problem


def _stray(folder: Path, chance: random.Random) -> Ended:
    """A link, a copy and half-made folders among the checkpoints, also where the next will be."""
    place = folder / "soak" / "checkpoints"
    place.mkdir(parents=True, exist_ok=True)
    step = last_step(folder / "soak")
    for name in (f"step_{step // 10 * 10 + 10:08d}", ".tmp-step_00000007", "step_99999999"):
        (place / name).mkdir(exist_ok=True)
    if step and not (place / "step_00000000").is_symlink():
        (place / "step_00000000").symlink_to(place / f"step_{step:08d}")
    return _stop(_start(folder), chance)


def _copies(folder: Path, chance: random.Random) -> Ended | None:
    """Of the oldest checkpoint, by the highest name and where the next will be."""
    place, step = folder / "soak" / "checkpoints", last_step(folder / "soak")
    if not step:
        return None
    oldest = checkpoint.checkpoints_in(place)[0]
    for name in (f"step_{step // 10 * 10 + 10:08d}", "step_99999999"):
        if not (place / name).exists():
            shutil.copytree(oldest, place / name)
    session, problem = _stop(_start(folder), chance)
    session.all_end()
    if last_step(folder / "soak") < step:
        problem = problem or f"a copy was taken for the newest: {step} steps had been done"
    return session, problem


def _stray_files(folder: Path, chance: random.Random) -> Ended | None:
    """A third rank's files, `latest` outside the run, and a record of a later version."""
    run_path, step = folder / "soak", last_step(folder / "soak")
    newest = checkpoint.latest(run_path / "checkpoints")
    if newest is None:
        return None
    (newest / "rank_00002.json").write_text("of another run")
    (newest / "rank_00002.safetensors").write_text("of another run")
    (run_path / "checkpoints" / "latest").write_text(chance.choice(["/etc", "..", "../.."]))
    with (run_path / METRICS_FILE).open("a") as metrics:
        metrics.write('{"kind": "of a later version", "step": 1}\n')
    session, problem = _stop(_start(folder), chance)
    session.all_end()
    if last_step(run_path) < step:
        problem = problem or f"training began anew: {step} steps had been done"
    return session, problem


def _other_text(folder: Path, chance: random.Random) -> Ended:
    """One rank sees a file that was edited and has the same size."""
    other, edited = folder / "other", chance.choice(sorted(TEXTS.values()))
    other.mkdir(exist_ok=True)
    for name in TEXTS.values():
        shutil.copyfile(folder / name, other / name)
    with (other / edited).open("r+b") as file:
        file.seek(10_000 + chance.randrange(100_000))
        letter = file.read(1)
        file.seek(-1, 1)
        file.write(b"a" if letter != b"a" else b"b")
    rank = chance.randint(0, 1)
    return _refused(
        _start(folder, fault="elsewhere", rank=rank, steps=other),
        rf"the ranks differ in {folder}/{edited}.jsonl",
    )


def _fork(folder: Path, chance: random.Random) -> Ended | None:
    """A new run begins from an earlier checkpoint, is killed, and the same command goes on."""
    earlier = checkpoint.checkpoints_in(folder / "soak" / "checkpoints")[:-1]
    if not earlier or not _is_whole(earlier[-1]):
        return None
    shutil.rmtree(folder / "fork", ignore_errors=True)
    resume = ("--resume", str(earlier[-1]))
    refused, problem = _refused(_start(folder, *resume), r"does not go back to .*--set name=NEW")
    refused.all_end()
    first = Session(folder, "fork", arguments=resume)
    problem = problem or first.until_training(chance, early=0)
    time.sleep(chance.uniform(0, 6))
    first.signal(signal.SIGKILL, first.ranks())
    first.all_end()
    session, problem = _stop(Session(folder, "fork", arguments=resume), chance, problem)
    session.all_end()
    if last_step(folder / "fork") <= checkpoint.step_of(earlier[-1]):
        problem = problem or f"the new run saved nothing: {session.said[-300:]}"
    return session, problem


def _copied_run(folder: Path, chance: random.Random) -> Ended:
    """A copy of the run's folder, with its lock: it does not stop the run, and is trained too."""
    copy = folder / "copy"
    shutil.rmtree(copy, ignore_errors=True)
    session = _start(folder)
    problem = session.until_training(chance, early=0)
    with contextlib.suppress(shutil.Error):  # of what is saved or pruned just now
        shutil.copytree(session.run_path, copy, ignore=shutil.ignore_patterns(".tmp-*"))
    command = [sys.executable, "-m", "sparsellm", "stop", str(copy)]
    stopped = subprocess.run(command, capture_output=True, text=True, check=False)
    if not stopped.returncode or "was copied from" not in stopped.stderr:
        problem = problem or f"stop was not refused for the copy: {stopped.stderr}"
    second = Session(folder, "copy")
    problem = problem or second.until_training(chance, early=0)
    if not second.alive:
        problem = problem or f"the copy is not trained: {second.said[-300:]}"
    return _stop(session, chance, problem)


def _wandb(folder: Path, chance: random.Random) -> Ended:
    """wandb is out of reach."""
    online = ("--set", "logging.wandb=online")
    return _stop(_start(folder, *online, environment=NO_WANDB), chance)


FAULTS: dict[str, Fault] = {
    "raise": _injected(
        "raise", r"error( \(rank 1\))?: RuntimeError: injected fault|rank 0\): Runt"
    ),
    "data": _injected("data", r"shard 7 is missing; restore it"),
    "full disk": _injected("disk", r"cannot be written|was not written|free space"),
    "stall": _injected("sleep", r"has not ended after \d+ s\. rank [01] \(.*timeout_minutes 2"),
    "freeze": _injected("freeze", r"gave no sign of life for 30 s|main rank is gone|has not ended"),
    "differing ranks": _differ,
    "validation": _validation,
    "kill rank": _killed("rank"),
    "kill launcher": _killed("launcher"),
    "kill all": _killed("all"),
    **{name: _signalled(name) for name in SIGNALS},
    "bit flip": _bit_flip,
    "second training": _second,
    "rollback": _rollback,
    "purge": _purge,
    "stray folders": _stray,
    "wandb": _wandb,
    "copied checkpoints": _copies,
    "stray files": _stray_files,
    "other text": _other_text,
    "new run from an earlier checkpoint": _fork,
    "copied run": _copied_run,
}
