"""The command line: quick, and helpful about what was probably meant."""

import os
import re
import resource
import signal
import subprocess
import sys
import time

import pytest
from conftest import ROOT, process_env, python, set_arguments
from warm import Program

from sparsellm import __version__
from sparsellm.cli import main, recipe_cli
from sparsellm.processes.banner import Machine
from sparsellm.recipe import load_recipe
from sparsellm.runs.lock import Presence


@pytest.fixture
def refused(capsys):
    """Runs a command that the parser refuses; returns its last line."""

    def run(*arguments: str) -> str:
        with pytest.raises(SystemExit, match="2"):
            main(arguments)
        return capsys.readouterr().err.splitlines()[-1]

    return run


@pytest.mark.parametrize(
    ("command", "meant"),
    [
        ("trian debug", "did you mean 'train'?"),
        ("recipe shwo debug", "did you mean 'show'?"),
        ("train debug --steps 10", "did you mean --set train.steps=10?"),
        ("train debug --steps=10", "did you mean --set train.steps=10?"),
        ("train debug --train.steps 10", "did you mean --set train.steps=10?"),
        ("train debug --lr 3e-4", "did you mean --set optimizer.learning_rate=3e-4?"),
        ("train debug --micro-batch-size 3", "did you mean --set train.micro_batch_size=3?"),
        ("train debug --hiden-size 64", "did you mean --set model.hidden_size=64?"),
        ("train debug --frech", "did you mean --fresh?"),
        ("eval . --batchsize 3", "did you mean --batch-size?"),
        ("train debug --every-steps 5", "--set validation.every_steps=5"),
        ("train debug --qqq", "there is no option --qqq; see sparsellm train --help"),
        ("train debug 0.5b", "unexpected argument '0.5b'"),
        ("train debug --set name=a train.steps=2", "every key needs its own --set: --set train.st"),
        ("train debug --recipe 0.5b", "debug and --recipe 0.5b: give one recipe"),
        ("train --fresh", "which recipe? For example: sparsellm train 0.5b"),
    ],
)
def test_what_was_meant(refused, command, meant):
    assert meant in refused(*command.split())


@pytest.mark.parametrize(
    ("command", "listed"),
    [
        ([], "train a recipe; the same command resumes"),
        (["recipe"], "list the bundled recipes"),
        (["data"], "write a corpus as shards"),
        (["bench"], "one FFN"),
        (["sweep"], "quality             Validation loss"),
    ],
)
def test_alone_a_command_lists_its_own(command, listed, capsys):
    assert main(command) == 0
    assert listed in capsys.readouterr().out
    with pytest.raises(SystemExit, match="2"):
        main([*command, "--qqq"])


@pytest.mark.parametrize(
    "words",
    [
        ["debug", "--set", "train.steps=7"],
        ["--set", "train.steps=7", "debug"],
        ["--recipe", "debug", "--set", "train.steps=7"],
        ["--set", "train.steps=7", "--gpus", "1", "debug"],
    ],
)
def test_a_recipe_is_given_with_and_without_its_flag(cli_here, words):
    shown = cli_here("recipe", "show", *words)
    warns = not Machine.present().gpus and "--gpus" not in words
    assert ("this machine has no GPU; the above is for" in shown.stdout) == warns
    assert "name: debug" in shown.stdout
    assert "steps: 7\n" in shown.stdout


def test_a_name_that_is_nearly_right(cli_here):
    assert "did you mean '0.5b'?" in cli_here("recipe", "show", "0.5bb", status=1).stderr


def test_keys_are_described_with_type_default_and_limits(cli_here):
    output = cli_here("recipe", "keys", "train").stdout
    assert output.startswith("train.steps: whole number > 0\n    Optimizer steps\n")
    assert "optimizer" not in output
    everything = cli_here("recipe", "keys").stdout
    assert 'ffn.kernels: auto | dense | sparse = "auto"\n' in everything
    assert "evaluation.limit: whole number > 0 | null = null\n" in everything
    assert "data.files: list of text | null = null\n" in everything
    pairs = "list of [number > 0 < 1, number > 0] = []"
    assert f"sparsity.target_schedule: {pairs}\n" in everything
    assert "optimizer.beta2: number ≥ 0 < 1 = 0.95\n" in everything
    assert "nearest valid key: 'train'" in cli_here("recipe", "keys", "trian", status=1).stderr


def test_a_size_of_ones_own(tmp_path, cli_here):
    recipe_file = tmp_path / "wide.yaml"
    recipe_file.write_text("base: debug\nname: wide\nmodel:\n  intermediate_size: 512\n")
    assert "intermediate_size: 512" in cli_here("recipe", "show", str(recipe_file)).stdout
    (tmp_path / "wider.yaml").write_text("base: wide.yaml\nname: wider\n")  # the file beside it
    shown = cli_here("recipe", "show", str(tmp_path / "wider.yaml")).stdout
    assert "intermediate_size: 512" in shown
    help_text = python("-m", "sparsellm", "recipe", "--help").stdout
    example = re.search(r"^  base:.*?\n\n", help_text, re.MULTILINE | re.DOTALL)
    recipe_file.write_text("\n".join(line[2:] for line in example[0].splitlines()))
    assert load_recipe(str(recipe_file)).model.intermediate_size == 8192


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("name=.a", "key 'name': must begin with a letter or a digit, and hold only letters"),
        ("model=3", "key 'model': must be a section of `key: value` lines (got 3)"),
        ("train.steps=x", "key 'train.steps': must be a valid integer, unable to parse string"),
        ("train.steps=1.5", "key 'train.steps': must be a valid integer, got a number with"),
        ("train.steps=0", "key 'train.steps': must be greater than 0 (got 0)"),
        ("optimizer.beta1=1", "key 'optimizer.beta1': must be less than 1 (got 1)"),
        ("runtime.compile=maybe", "must be a valid boolean, unable to interpret input (got 'm"),
        ("runtime.precision=fp16", "must be 'bf16', 'fp8' or 'fp32' (got 'fp16')"),
        ("data.corpus=3", "key 'data.corpus': must be text"),
    ],
)
def test_wrong_values_are_answered_in_plain_words(cli_here, override, says):
    done = cli_here("recipe", "show", "debug", "--set", override, status=1)
    assert says in done.stderr
    assert not re.search(r"Config|pydantic|\^\[", done.stderr)


_QUICK = [["--help"], ["trian"], ["train", "--help"], ["train", "debug", "--steps", "3"],
          ["recipe", "list"], ["recipe", "show", "0.5b"], ["recipe", "keys"], ["train", "0.5bb"],
          ["stop", "runs/none"], ["completion", "bash"], ["sweep"], ["sweep", "none"],
          ["sweep", "quality", "--list"]]  # fmt: skip


@pytest.mark.parametrize("command", _QUICK, ids=" ".join)
def test_answers_without_torch(command):
    """Under a second on an idle machine, and under two on a busy one.

    What would take longer cannot be imported here.
    """
    slow = ["torch", "transformers", "numpy", "pyarrow", "fsspec"]
    if "--help" in command:
        slow += ["pydantic", "psutil"]
    code = (
        f"import sys; sys.modules |= dict.fromkeys({slow})\n"
        f"from sparsellm.cli import main\nsys.exit(main({command}))"
    )
    began = _seconds_of_children()
    done = python("-c", code, status=None)
    assert "Traceback" not in done.stderr
    assert done.stdout or "error:" in done.stderr
    assert _seconds_of_children() - began < 2


@pytest.mark.parametrize("policy", [None, "active"])
def test_torchs_idle_threads_sleep_unless_the_user_says_otherwise(policy, monkeypatch, cli_here):
    monkeypatch.setenv("OMP_WAIT_POLICY", policy or "")
    if policy is None:
        monkeypatch.delenv("OMP_WAIT_POLICY")
    cli_here("recipe", "list")
    assert os.environ["OMP_WAIT_POLICY"] == (policy or "passive")


def _seconds_of_children() -> float:
    """Of processors: those of the clock depend on what else is running."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@pytest.mark.parametrize(
    ("line", "offers"),
    [
        ("sparsellm tr", "train"),
        ("sparsellm train 0.", "0.5b"),
        ("sparsellm train debug --set train.s", "train.steps="),
        ("sparsellm train debug --fr", "--fresh"),
    ],
)
def test_a_shell_completes(line, offers, tmp_path):
    answers = tmp_path / "answers"
    environment = process_env(
        _ARGCOMPLETE="1", COMP_LINE=line, COMP_POINT=str(len(line)), _ARGCOMPLETE_IFS="\013",
        _ARGCOMPLETE_STDOUT_FILENAME=str(answers), _ARGCOMPLETE_SUPPRESS_SPACE="1",
        _ARGCOMPLETE_SHELL="bash", COMP_TYPE="9",
    )  # fmt: skip
    command = [sys.executable, "-m", "sparsellm"]
    subprocess.run(command, env=environment, check=True, capture_output=True, cwd=ROOT)
    assert any(answer.startswith(offers) for answer in answers.read_text().split("\013"))


@pytest.mark.slow
def test_stop_saves_ends_and_waits(tiny_overrides, tmp_path, cli_here):
    run_path = tmp_path / "runs" / "debug"
    command = ["train", "debug", *set_arguments([*tiny_overrides, "train.steps=100000"])]
    printed = tmp_path / "printed"
    training = Program(("-m", "sparsellm", *command), process_env(), printed, printed)
    try:
        while training.poll() is None and not (run_path / "checkpoints" / "latest").is_file():
            time.sleep(0.1)
        stopped = cli_here("stop", run_path, "--no-wait")
        assert f"asked process {training.pid} to stop" in stopped.stdout
        assert training.wait(60) == 0
    finally:
        training.send_signal(signal.SIGKILL)
    assert "stopped after step" in printed.read_text()
    assert not (run_path / "running.json").exists()
    assert f"no process trains {run_path}" in cli_here("stop", run_path, status=1).stderr


def test_stop_does_not_signal_another_process(tmp_path, cli_here):
    presence = Presence.within(tmp_path, "id").model_copy(update={"created": 1.0})
    elsewhere = presence.model_copy(update={"host": "elsewhere"})
    for holder, answer in (
        (elsewhere, "is trained on host elsewhere"),
        (presence, "no process trains"),  # one of this number has begun since
    ):
        (tmp_path / "running.json").write_text(holder.model_dump_json())
        assert answer in cli_here("stop", tmp_path, status=1).stderr


def test_make_help_names_every_verb():
    done = subprocess.run(["make", "help"], capture_output=True, text=True, check=True, cwd=ROOT)
    verbs = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)[1].split()
    assert re.findall(r"^  make ([\w-]+)", done.stdout, re.MULTILINE) == verbs


_PIPED = [["recipe", "keys"], ["recipe", "show", "0.5b"], ["--help"]]


def _without_a_reader(*arguments: str, stderr: bool = False) -> subprocess.CompletedProcess[str]:
    """Runs a command whose output, or errors, go to a pipe that is closed at the other end."""
    reader, writer = os.pipe()
    os.close(reader)
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    streams["stderr" if stderr else "stdout"] = writer
    command = [sys.executable, "-m", "sparsellm", *arguments]
    done = subprocess.run(command, **streams, text=True, check=False, env=process_env())
    os.close(writer)
    return done


@pytest.mark.parametrize("command", _PIPED, ids=" ".join)
def test_a_command_ends_quietly_with_its_reader(command):
    """As `sparsellm recipe keys | head` does: killed by the signal, as `cat` is."""
    done = _without_a_reader(*command)
    assert done.stderr == ""
    assert done.returncode == -signal.SIGPIPE


@pytest.mark.parametrize("command", [["train", "0.5bb"], ["trian"]], ids=" ".join)
def test_errors_that_nobody_reads_end_it_too(command):
    done = _without_a_reader(*command, stderr=True)
    assert done.stdout == ""
    assert done.returncode == -signal.SIGPIPE


@pytest.mark.slow
def test_a_training_ends_quietly_with_its_reader(tiny_overrides):
    done = _without_a_reader("train", "debug", *set_arguments(tiny_overrides))
    assert done.stderr == ""
    assert done.returncode == -signal.SIGPIPE


@pytest.mark.slow
@pytest.mark.parametrize("terminal", [False, True])
def test_a_training_is_saved_when_its_reader_leaves(tiny_overrides, tmp_path, terminal):
    """Ctrl-C also ends the `tee` after it, and a terminal may be closed without a signal."""
    reader, writer = os.openpty() if terminal else os.pipe()
    endless = [
        "train.steps=1000000",
        "checkpoint.every_steps=1000000",
        f"logging.run_dir={tmp_path}",
    ]
    arguments = set_arguments([*tiny_overrides, *endless, "name=left"])
    command = [sys.executable, "-m", "sparsellm", "train", "debug", *arguments]
    streams = {"stdin": subprocess.DEVNULL, "stdout": writer, "stderr": writer}
    process = subprocess.Popen(command, **streams, env=process_env(), start_new_session=True)
    os.close(writer)
    with os.fdopen(reader, encoding="utf-8") as output:
        while "step  " not in output.readline():
            assert process.poll() is None
    assert process.wait() == 0
    assert list((tmp_path / "left" / "checkpoints").glob("step_*"))
    assert '"stopped (nobody reads its output)"' in (tmp_path / "left/metrics.jsonl").read_text()


@pytest.mark.slow
def test_a_training_without_an_output_ends_as_it_should(tiny_overrides, tmp_path):
    """Another file then has the number of standard output."""
    command = [sys.executable, "-m", "sparsellm", "train", "debug", *set_arguments(tiny_overrides)]
    shell = ["bash", "-c", 'exec "$@" >&- 2>&-', "bash", *command]
    assert subprocess.run(shell, check=False, env=process_env(), timeout=120).returncode == 0


def test_a_broken_pipe_of_another_kind_is_an_error(cli_here, monkeypatch):
    def fails(*_: object) -> None:
        raise BrokenPipeError(32, "Broken pipe", "a worker's")

    monkeypatch.setattr(recipe_cli, "_list", fails)
    done = cli_here("recipe", "list", status=1)
    assert 'error: [Errno 32] Broken pipe: "a worker\'s"' in done.stderr


def test_recipes_are_listed_by_size_with_their_number_of_parameters(cli_here):
    lines = cli_here("recipe", "list").stdout.splitlines()
    sizes = {name: size for name, size, *_ in map(str.split, lines)}
    plain = [name for name in sizes if "/" not in name]
    assert plain == ["debug", "small", "pilot", "0.5b", "relufy", "1b", "1.5b", "2b", "8b"]
    assert list(sizes)[: len(plain)] == plain
    assert (sizes["debug"], sizes["small"], sizes["2b"]) == ("845k", "116M", "2.06B")


def test_the_version_is_an_option_and_a_command(cli_here, capsys):
    assert cli_here("version").stdout == f"sparsellm {__version__}\n"
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"sparsellm {__version__}\n"


def test_retries_of_the_hub_are_not_printed():
    """An error that has the cause and the remedy follows them."""
    code = (
        "from huggingface_hub.utils import http_backoff\n"
        "from sparsellm.cli import main\n"
        "main(['version'])\n"
        "http_backoff('HEAD', 'http://127.0.0.1:9', max_retries=1, base_wait_time=0)"
    )
    done = python("-c", code, status=1, HF_HUB_OFFLINE="0")
    assert "Connection refused" in done.stderr
    assert "Retrying" not in done.stderr
