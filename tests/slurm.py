"""A real Slurm of two nodes on this machine, where slurm-wlm and munge are installed."""

import contextlib
import getpass
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel", "squeue")
# The first node is called as this machine: the ranks find one another by its name.
NODES = (socket.gethostname().partition(".")[0], "zz-second")

CONFIG = """
ClusterName=test
SlurmctldHost={first}(127.0.0.1)
SlurmctldPort={ports[0]}
AuthInfo=socket={folder}/munge.socket
SlurmUser={user}
SlurmdUser={user}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
KillWait=10
SlurmdParameters=config_overrides
NodeName={first} NodeHostname={first} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=8
NodeName={second} NodeHostname={first} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=8
PartitionName=low Nodes=ALL Default=YES PriorityTier=1 GraceTime=60
PartitionName=high Nodes=ALL PriorityTier=2 PreemptMode=OFF
"""


def missing() -> list[str]:
    """The programs of Slurm that are not installed."""
    return [name for name in PROGRAMS if not _program(name)]


def _program(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin:/sbin")


class Slurm:
    """Asks Slurm, as its commands do."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = os.environ | {"SLURM_CONF": str(folder / "slurm.conf")}

    def call(self, *words: str, **environment: str) -> str:
        """What a command prints."""
        done = subprocess.run(
            words, env=self.environment | environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{words}: {done.stderr}"
        return done.stdout.strip()

    def submit(self, output: Path, *words: str, **environment: str) -> str:
        """Queues a script on both nodes, for its output see ``output``; the job's number."""
        arguments = ("--parsable", "--nodes=2", "--gpus-per-node=0", "--cpus-per-task=4")
        return self.call("sbatch", *arguments, f"--output={output}", *words, **environment)

    def about(self, job: str, key: str) -> str:
        """A value of ``scontrol show job``."""
        words = self.call("scontrol", "show", "job", "--oneliner", job).split()
        return next(word.partition("=")[2] for word in words if word.startswith(f"{key}="))

    def wait(self, job: str, *states: str, seconds: float = 60) -> None:
        """Until a job is in one of these states."""
        end = time.monotonic() + seconds
        while (state := self.about(job, "JobState")) not in states:
            assert time.monotonic() < end, f"job {job} is {state}, not {states}"
            time.sleep(0.2)

    def start_now(self, job: str) -> None:
        """A job that is queued again would wait for two minutes."""
        self.wait(job, "PENDING")
        self.call("scontrol", "update", f"JobId={job}", "StartTime=now")


@contextlib.contextmanager
def running_slurm(folder: Path) -> Iterator[Slurm]:
    """Its daemons, as this user; ends them and all their jobs."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(3)]
        for free in sockets:
            free.bind(("", 0))
        ports = [free.getsockname()[1] for free in sockets]
    config = CONFIG.format(
        folder=folder, user=getpass.getuser(), first=NODES[0], second=NODES[1], ports=ports
    )
    (folder / "slurm.conf").write_text(config, encoding="utf-8")
    for name in ("state", *(f"spool.{node}" for node in NODES)):
        (folder / name).mkdir()
    key = folder / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)
    names = {"socket": "socket", "key-file": "key", "pid-file": "pid", "log-file": "log"}
    options = [f"--{option}={folder}/munge.{end}" for option, end in names.items()]
    slurm = Slurm(folder)
    daemons = [["munged", "--foreground", "--force", *options, f"--seed-file={folder}/munge.seed"]]
    daemons += [["slurmctld", "-D", "-c", "-L", f"{folder}/slurmctld.log"]]
    daemons += [["slurmd", "-D", "-N", node, "-L", f"{folder}/{node}.log"] for node in NODES]
    started = []
    try:
        for name, *words in daemons:
            with (folder / f"{name}.out").open("a") as output:
                command = [str(_program(name)), *words]
                started.append(
                    subprocess.Popen(
                        command, env=slurm.environment, stdout=output, stderr=subprocess.STDOUT
                    )
                )
            time.sleep(0.5)
        end = time.monotonic() + 30
        while slurm.call("sinfo", "--noheader", "--format=%t %D", "--partition=low") != "idle 2":
            assert time.monotonic() < end, "Slurm's nodes do not come up; see its logs"
            time.sleep(0.2)
        yield slurm
        slurm.call("scancel", f"--user={getpass.getuser()}")
        while slurm.call("squeue", "--noheader"):
            time.sleep(0.2)
    finally:
        family = [p for d in started for p in psutil.Process(d.pid).children(recursive=True)]
        for process in (*reversed(started), *family):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        for daemon in started:
            daemon.wait()
