"""Local JSONL and wandb: the same numbers, once, across restarts."""

import errno
import json
import math
import os
import signal
import struct
import threading
import time
import zlib
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import python
from fake_server import FakeServer

from runs.written_runs import train_record
from sparsellm.runs.telemetry import wandb_file
from sparsellm.runs.telemetry.dashboard import wandb_values
from sparsellm.runs.telemetry.metrics import LAYER_METRICS, METRICS
from sparsellm.runs.telemetry.metrics_log import MetricsLog
from sparsellm.runs.telemetry.records import (
    EvaluationRecord,
    FailureRecord,
    Session,
    SessionEndRecord,
    SessionRecord,
    ValidationRecord,
    read_lines,
    read_metrics,
)
from sparsellm.runs.telemetry.wandb_file import logged_steps
from sparsellm.training.meter import progress_line


def _log(recipe, resume_step):
    return MetricsLog(recipe, resume_step, _session(resume_step, "a", time.time()))


def _read(recipe):
    """The records, without those of sessions."""
    records = read_metrics(recipe.run_path)
    return [record for record in records if not record["kind"].startswith("session")]


def _write(recipe, steps, resume_step=0):
    log = _log(recipe, resume_step)
    for step in steps:
        log.write(train_record(recipe, step))
        if step % 2 == 0:
            tokens = step * recipe.train.global_batch_tokens
            log.write(ValidationRecord(step, tokens, 4.0 / step, num_targets=512))
    log.close("finished")


def test_jsonl_holds_what_was_written(tiny):
    recipe = tiny()
    _write(recipe, [1, 2])
    train, second, validation = _read(recipe)
    assert (train["kind"], train["step"], train["loss"]) == ("train", 1, 5.0)
    assert second["sparsity"]["dead_fraction"] == [0.0, 0.25]
    assert validation == {
        "kind": "validation",
        "step": 2,
        "tokens": 512,
        "loss": 2.0,
        "num_targets": 512,
    }


def test_resume_drops_later_records_and_half_a_line(tiny):
    recipe = tiny()
    _write(recipe, [1, 2, 3])
    path = recipe.run_path / "metrics.jsonl"
    with path.open("a") as file:
        file.write('{"kind": "train", "st')
    _write(recipe, [3, 4], resume_step=2)
    assert [(r["kind"], r["step"]) for r in _read(recipe)] == [
        ("train", 1),
        ("train", 2),
        ("validation", 2),
        ("train", 3),
        ("train", 4),
        ("validation", 4),
    ]


def test_a_damaged_line_is_named_on_resume(tiny):
    recipe = tiny()
    _write(recipe, [1])
    path = recipe.run_path / "metrics.jsonl"
    path.write_text("\0\n" + path.read_text(), encoding="utf-8")
    with pytest.raises(
        ValueError, match=r"metrics.jsonl, line 1 is damaged: not JSON .*correct that line"
    ):
        _log(recipe, 1)


def _is_float(value):
    return isinstance(value, float)


def _of_each_kind(recipe):
    return [
        train_record(recipe, 2),
        ValidationRecord(2, 512, 3.0, 512, {"a": 3.0}),
        EvaluationRecord(2, 512, 0.5, 0.1, {"piqa": {"acc": 0.5}}),
        FailureRecord(2, 512, "step", "loss nan"),
        _session(2, "a", 1.0),
        SessionEndRecord(2, 512, "a", 3.0, "finished"),
    ]


def test_a_line_without_a_field_is_read_and_shown(tiny, capsys):
    """As lines are that an earlier version wrote, before there was the field."""
    recipe = tiny()
    path = recipe.run_path / "metrics.jsonl"
    path.parent.mkdir(parents=True)
    for record in _of_each_kind(recipe):
        whole = json.loads(json.dumps(record.line()))
        paths = [(key,) for key in whole if key not in ("kind", "step")]
        paths += [(o, key) for o in ("sparsity", "kernels") for key in whole.get(o, ())]
        for *outer, key in paths:
            line = json.loads(json.dumps(whole))
            del (line[outer[0]] if outer else line)[key]
            path.write_text(json.dumps(line) + "\n")
            [(_, read)] = read_lines(path)
            assert type(read) is type(record)
            [shown] = read_metrics(recipe.run_path)
            (shown[outer[0]] if outer else shown).pop(key, None)  # its default
            assert shown == line
            if not isinstance(read, Session):
                values = wandb_values(read, recipe)
                assert not any(map(math.isnan, filter(_is_float, values.values())))
            MetricsLog(recipe, 2, _session(2, "b", time.time())).close("finished")
    assert capsys.readouterr().err == ""


def test_what_another_version_wrote_is_passed_over_and_kept(tiny):
    recipe = tiny()
    _write(recipe, [1, 2])
    path = recipe.run_path / "metrics.jsonl"
    session, first, *more_lines = path.read_text().splitlines(True)
    newer = json.loads(first) | {"step": 3, "shape": [1], "version": "9"}
    newer["sparsity"]["entropy"] = [0.5, 0.5]
    lines = [
        json.dumps(newer),
        json.dumps({"kind": "failure", "step": 3, "what": "step", "stack": "main"}),
        json.dumps({"kind": "session_gpu", "temperature": 60}),
    ]
    path.write_text("".join([session, first, *more_lines, *(f"{line}\n" for line in lines)]))
    records = _read(recipe)
    assert [r["step"] for r in records if r["kind"] == "train"] == [1, 2, 3]
    record = records[0]
    assert records[3] == record | {"step": 3}
    MetricsLog(recipe, 3, _session(3, "a", 1.0)).close("finished")
    assert path.read_text().splitlines()[5:8] == lines


class FakeWandb:
    """In place of wandb's run: what it got, and a network that may be gone."""

    id = "1234"

    def __init__(self):
        self.steps, self.reachable, self.modes, self.summary = [], True, [], {}

    def start(self, recipe, mode):
        self.modes.append(mode)
        if not self.reachable and mode == "online":
            raise ConnectionError("Network is unreachable")
        return self

    def log(self, values):
        if not self.reachable and self.modes[-1] == "online":
            raise ConnectionResetError("Connection lost")
        if "train/loss" in values:
            self.steps.append(values["step"])
        self.summary |= values

    def finish(self):
        pass


@pytest.fixture
def fake_wandb(monkeypatch):
    fake = FakeWandb()
    monkeypatch.setattr("sparsellm.runs.telemetry.dashboard.start_wandb", fake.start)
    monkeypatch.setattr("sparsellm.runs.telemetry.dashboard.WRITE_SECONDS", 0.0)  # no files
    return fake


def test_without_its_dashboard_a_run_is_offline_and_sends_each_record_once(
    tiny, fake_wandb, monkeypatch, capsys
):
    recipe, written = tiny("logging.wandb=online"), threading.Event()
    fake_wandb.reachable = False
    monkeypatch.setattr(  # which may take as long as it likes
        "sparsellm.runs.telemetry.dashboard.start_wandb",
        lambda *arguments: written.wait(60) and fake_wandb.start(*arguments),
    )
    log = _log(recipe, 0)
    for step in (1, 2, 3):
        log.write(train_record(recipe, step))
    written.set()
    log.close("finished")
    printed = capsys.readouterr().err
    assert printed.count("wandb is out of reach (ConnectionError: Network is unreachable)") == 1
    assert "`wandb sync" in printed
    assert fake_wandb.modes == ["online", "offline"]
    assert fake_wandb.steps == [1, 2, 3]
    assert [r["step"] for r in _read(recipe)] == [1, 2, 3]

    fake_wandb.reachable = True
    _write(recipe, [2, 3, 4], resume_step=1)  # as after a kill: the same numbers again
    assert fake_wandb.steps == [1, 2, 3, 4]


def test_a_dashboard_that_fails_within_a_run_gets_the_rest_offline(tiny, fake_wandb):
    recipe = tiny("logging.wandb=online")
    log = _log(recipe, 0)
    log.write(train_record(recipe, 1))
    _until(lambda: fake_wandb.steps == [1])
    fake_wandb.reachable = False
    log.write(train_record(recipe, 2))
    log.write(train_record(recipe, 3))
    log.close("finished")
    assert fake_wandb.steps == [1, 2, 3]
    assert fake_wandb.modes == ["online", "offline"]


def _until(condition):
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_full_disk_keeps_records_waiting_and_names_the_file(tiny, monkeypatch, capsys):
    recipe = tiny()
    log = _log(recipe, 0)
    real, room = log._file, 100

    class Full:
        """Takes a part of a line before it is full, as a disk does."""

        def write(self, data):
            nonlocal room
            if room == 0:
                raise OSError(errno.ENOSPC, "No space left on device")
            num_written = real.write(data[:room])
            room -= num_written
            return num_written

        def __getattr__(self, name):
            return getattr(real, name)

    log._file = Full()
    for step in (1, 2, 3):
        log.write(train_record(recipe, step))
    warned = capsys.readouterr().err
    assert warned.count("metrics.jsonl cannot be written (No space left on device)") == 1
    with pytest.raises(OSError, match=r"free space, and the same command .*metrics.jsonl"):
        log.sync()
    room = 10**6
    log.write(train_record(recipe, 4))
    log.close("finished")
    assert [r["step"] for r in _read(recipe)] == [1, 2, 3, 4]


def _session(step, identity, started_at):
    return SessionRecord(
        step=step,
        tokens=256 * step,
        id=identity,
        started="2026-01-01T00:00:00+00:00",
        started_at=started_at,
        startup_seconds=10.0,
        ranks=2,
        device="cpu",
        cores=2,
        host="node1",
        pid=7,
        commit="abc1234",
        versions={"torch": "2.13.0"},
    )


def test_sessions_are_kept_and_a_killed_one_gets_its_end_from_the_next(tiny):
    recipe = tiny()
    first = MetricsLog(recipe, 0, _session(0, "a", time.time() - 100))
    for step in (1, 2, 3):
        first.write(train_record(recipe, step))
    # Killed. The next one resumes from step 1, a third from there too.
    second = MetricsLog(recipe, 1, _session(1, "b", time.time()))
    second.write(train_record(recipe, 2))
    second.close("stopped (SIGTERM)")
    MetricsLog(recipe, 1, _session(1, "c", time.time())).close("finished")
    records = read_metrics(recipe.run_path)
    assert [(r["kind"], r["step"]) for r in records if r["kind"] == "train"] == [("train", 1)]
    assert [r["id"] for r in records if r["kind"] == "session"] == ["a", "b", "c"]
    ends = {r["session"]: r for r in records if r["kind"] == "session_end"}
    assert [ends[i]["how"] for i in "abc"] == ["killed", "stopped (SIGTERM)", "finished"]
    assert ends["a"]["seconds"] == 13  # to the record of step 3, not to now, as of a copied file
    assert 10 <= ends["b"]["seconds"] < 15
    assert ends["a"]["step"] == 3


def test_a_session_that_says_nothing_lasted_no_time(tiny):
    recipe = tiny()
    recipe.run_path.mkdir(parents=True)
    (recipe.run_path / "metrics.jsonl").write_text('{"kind": "session", "step": 0}\n')
    MetricsLog(recipe, 0, _session(0, "b", time.time())).close("finished")
    [_, end, *_] = read_metrics(recipe.run_path)
    assert (end["kind"], end["how"], end["seconds"]) == ("session_end", "killed", 0.0)


def _offline_records(run_path):
    """The records in the files of the offline runs, oldest first."""
    from wandb.proto.wandb_internal_pb2 import Record

    for path in sorted(run_path.glob("wandb/offline-run-*/run-*.wandb")):
        content = path.read_bytes()
        assert content[:4] == b":W&B"
        yield from map(Record.FromString, wandb_file._records(content))


def _settled_records(run_path):
    """The same once they grow no more: wandb's own process may write on after its `finish`."""
    records, more = None, list(_offline_records(run_path))
    while records != more:
        time.sleep(0.5)
        records, more = more, list(_offline_records(run_path))
    return records


def _history(records):
    """What was logged, of the records of a .wandb file."""
    return [
        {"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in record.history.item}
        for record in records
        if record.WhichOneof("record_type") == "history"
    ]


class FakeWandbServer(FakeServer):
    """wandb's server, as far as its client asks: one run, its history and its summary."""

    def __init__(self):
        super().__init__()
        self.history, self.summary, self.exists = [], "{}", False

    def answer(self, request):
        if request.path.endswith("file_stream"):
            files = json.loads(request.body).get("files") or {}
            if (chunk := files.get("wandb-history.jsonl")) is not None:
                self.history[chunk["offset"] :] = map(json.loads, chunk["content"])
            if (chunk := files.get("wandb-summary.json")) is not None:
                self.summary = chunk["content"][-1]
        data = {}
        if request.path == "/graphql":
            data = self._data(json.loads(request.body)["operationName"])
        request.send_json({"data": data})

    def _data(self, operation):
        project = {"id": "p", "name": "p", "entity": {"id": "e", "name": "e"}}
        lines = {"historyLineCount": len(self.history), "logLineCount": 0, "eventsLineCount": 0}
        run = {"id": "r", "name": "r", "displayName": "r", "config": "{}", "project": project}
        run |= {**lines, "summaryMetrics": self.summary, "wandbConfig": '{"t": 1}', "tags": []}
        run |= {"historyTail": json.dumps([json.dumps(h) for h in self.history[-1:]])}
        run |= {"eventsTail": "[]", "notes": "", "description": "", "sweepName": None}
        if operation == "Viewer":
            viewer = {"id": "v", "entity": "e", "username": "u", "email": "", "flags": "{}"}
            return {"viewer": viewer | {"teams": {"edges": []}}}
        if operation == "RunResumeStatus":
            return {"model": project | {"bucket": run if self.exists else None}}
        if operation == "UpsertBucket":
            inserted, self.exists = not self.exists, True
            return {"upsertBucket": {"bucket": run, "inserted": inserted}}
        if operation == "CreateRunFiles":
            return {"createRunFiles": {"runID": "r", "uploadHeaders": [], "files": []}}
        return {}


def _work(address, *arguments):
    """A process of `wandb_worker`."""
    paths = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    variables = {"WANDB_API_KEY": "0" * 40, "WANDB_BASE_URL": address, "WANDB_SILENT": "true"}
    worker = Path(__file__).with_name("wandb_worker.py")
    status = -signal.SIGKILL if "kill" in arguments else 0
    python(worker, *arguments, status=status, PYTHONPATH=paths, **variables)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["offline", "online"])
def test_what_wandb_lost_when_it_was_killed_is_sent_again_and_nothing_twice(tmp_path, mode):
    with FakeWandbServer() as server:
        _work(server.endpoint, tmp_path, mode, 1, 400, "kill")
        _work(server.endpoint, tmp_path, mode, 381, 420, "end")  # it resumes after step 380
        history = server.history
    if mode == "offline":
        history = _history(_settled_records(tmp_path / "debug"))
    assert [h["step"] for h in history if "train/loss" in h] == list(range(1, 421))
    assert [h["step"] for h in history if "validation/loss" in h] == list(range(2, 421, 2))
    failed = [(h["step"], k) for h in history for k in h if k.endswith("/failed")]
    assert failed[-2:] == [(420, "step/failed"), (420, "target/failed")]
    assert len(failed) == len(set(failed))
    sent = json.loads((tmp_path / "debug" / "wandb_sent.json").read_text())
    assert sent == dict.fromkeys(("failure/step", "failure/target", "train", "validation"), 420)


def test_the_file_of_an_offline_run_is_read_up_to_where_it_was_cut_off(tmp_path):
    from wandb.proto.wandb_internal_pb2 import HistoryItem, HistoryRecord, Record

    def record(step, length):
        items = [HistoryItem(key="sent/train", value_json=str(step))]
        items += [HistoryItem(nested_key=["sent", "failure", "step"], value_json=str(step // 2))]
        items += [HistoryItem(key="text", value_json=json.dumps("x" * length))]
        return Record(history=HistoryRecord(item=items)).SerializeToString()

    content = b":W&B" + bytes(3)
    for step in range(1, 7):  # the third and the fifth cross the end of a block
        rest, first = record(step, 14_000), True
        while rest or first:
            room = 32_768 - len(content) % 32_768
            if room < 7:
                content += bytes(room)
                continue
            part, rest = rest[: room - 7], rest[room - 7 :]
            kind = (1 if first else 4) if not rest else 2 if first else 3
            crc = zlib.crc32(bytes([kind]) + part)
            content += struct.pack("<IHB", crc, len(part), kind) + part
            first = False
    file = tmp_path / "run-1234.wandb"
    for cut, last in ((len(content), 6), (len(content) - 1, 5), (32_768 + 20_000, 3), (7, None)):
        for end in (b"", bytes(100)):
            file.write_bytes(content[:cut] + end)
            expected = {} if last is None else {"train": last, "failure/step": last // 2}
            assert logged_steps(file, "sent/") == expected


@pytest.mark.slow
def test_offline_wandb_run_holds_the_same_numbers_and_continues_after_resume(tiny, monkeypatch):
    monkeypatch.setenv("WANDB_SILENT", "true")
    recipe = tiny("logging.wandb=offline")
    _write(recipe, [1, 2, 3])
    _write(recipe, [3, 4], resume_step=2)

    records = _settled_records(recipe.run_path)
    history, run_ids, configs, metrics = _history(records), set(), [], {}
    for record in records:
        kind = record.WhichOneof("record_type")
        if kind == "run":
            run_ids.add(record.run.run_id)
            configs.append({u.key: json.loads(u.value_json) for u in record.run.config.update})
        elif kind == "metric":
            metric = record.metric
            metrics[metric.name or metric.glob_name] = metric.step_metric

    assert run_ids == {(recipe.run_path / "wandb_id").read_text()}
    assert metrics["*"] == "tokens"
    assert configs[0]["model"]["intermediate_size"] == 64

    train = [h for h in history if "train/loss" in h]
    assert [h["step"] for h in train] == [1, 2, 3, 4]
    written = {r["step"]: r for r in read_metrics(recipe.run_path) if r["kind"] == "train"}
    for h in train:
        local = written[h["step"]]
        assert h["tokens"] == local["tokens"]
        for key in ("loss", "l1", "grad_norm", "learning_rate", "tokens_per_second"):
            assert h[f"train/{key}"] == local[key]
        for layer in range(2):
            for key in ("nnz_mean", "nnz_p99", "nnz_max", "dead_fraction"):
                assert h[f"layers/{key}/{layer:02d}"] == local["sparsity"][key][layer]
        assert h["sparsity/nnz_per_token/values"] == local["sparsity"]["nnz_histogram"]
        assert h["positions/nnz/00001"] == 1.0
    assert [h["validation/loss"] for h in history if "validation/loss" in h] == [2.0, 1.0]


@pytest.mark.slow
def test_steps_of_another_recipe_are_another_wandb_runs(tiny, monkeypatch, capsys):
    monkeypatch.setenv("WANDB_SILENT", "true")
    recipe = tiny("logging.wandb=offline")
    _write(recipe, [1, 2, 3])
    ids = [(recipe.run_path / "wandb_id").read_text()]
    rate = ["optimizer.learning_rate 1 → 0.5"]
    for step, changes, is_another in (
        (2, ["logging.every_steps 1 → 2"], False),
        (2, rate, True),
        (2, rate, False),  # it was killed before its first checkpoint
        (2, [], True),  # as it was before
        (2, ["evaluation.limit 10 → 20"], True),
        (1, [], True),  # further back
    ):
        session = replace(_session(step, "b", time.time()), changes=changes)
        log = MetricsLog(recipe, step, session)
        log.write(train_record(recipe, 3))
        log.close("finished")
        assert ("a new run gets all records" in capsys.readouterr().out) == is_another
        ids.append((recipe.run_path / "wandb_id").read_text())
        assert (ids[-1] != ids[-2]) == is_another
    train = [h["step"] for h in _history(_settled_records(recipe.run_path)) if "train/loss" in h]
    # Of five wandb runs, in any order: folders that began in the same second sort by their ids.
    assert sorted(train) == sorted([1, 2, 3] * 4 + [1, 3])


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (45.967, "47× target"),  # 2,818 non-zeros for 60, at the first step
        (1.0, "2× target"),
        (0.999, "99.9% above target"),
        (0.0, "0.0% above target"),
        (-0.25, "25.0% below target"),
    ],
)
def test_how_far_a_run_is_from_its_target_can_be_read_at_any_distance(tiny, error, text):
    record = train_record(tiny(), 1)
    shown = progress_line(replace(record, values=record.values | {"target_error": error}), tiny())
    assert f" | nnz 10.5 (16.41%) | {text} | " in shown


def test_progress_line_is_one_readable_line(tiny):
    recipe = tiny("train.steps=1000")
    record = train_record(recipe, 10)
    line = progress_line(replace(record, values=record.values | {"mfu": 0.412}), recipe)
    assert line == (
        "step   10/1000 | loss 0.5000 | l1 0.05 | nnz 1.5 (2.34%) | dead 12.5% | "
        "12.3k tok/s | mfu 41.2% | mem 1.2 GiB | eta 0:00:21"
    )
    assert "mfu" not in progress_line(record, recipe)


def test_no_two_metrics_have_the_same_name():
    for metrics in (METRICS, LAYER_METRICS):
        assert len({metric.name for metric in metrics}) == len(metrics)
