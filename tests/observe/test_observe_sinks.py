"""Sinks: what a run leaves behind, also when it is killed, resumed, or started twice in one folder."""

import io
import json
import math
import sys
import types

import pytest
import torch
from rich.console import Console

from megappo.errors import UserError
from megappo.observe.sinks import Sinks, build_sinks
from megappo.observe.sinks.console import ConsoleSink, summary
from megappo.observe.sinks.jsonl import JsonlSink
from megappo.observe.sinks.tensorboard import markdown_table

PPO_METRICS = {
    "critic/score/mean": 0.5,
    "actor/ppo_kl": 0.0123,
    "actor/entropy": 1.5,
    "actor/pg_clipfrac": 0.1,
    "response_length/mean": 31.7,
    "actor/pg_loss": -0.02,
    "critic/vf_loss": 0.25,
    "actor/grad_norm": 0.9,
    "critic/grad_norm": 12.0,
    "perf/throughput": 12345.6,
    "timing_s/step": 3.21,
}
PPO_LINE = (
    "score 0.500  kl 0.0123  ent 1.500  clip 0.100  len 32  pg -0.0200  vf 0.2500  gnorm 0.9  vnorm 12  "
    "tok/s 12,346  s 3.2"
)


def read_lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


# --- jsonl ---------------------------------------------------------------------------------------------


def test_jsonl_lines_are_on_disk_at_once_with_sorted_keys(tmp_path):
    sink = JsonlSink(tmp_path / "deep" / "run")
    sink.log({"b": 2.0, "a": torch.tensor(1.5)}, step=3)
    text = (tmp_path / "deep" / "run" / "metrics.jsonl").read_text()  # before close
    assert text == '{"a": 1.5, "b": 2.0, "step": 3}\n'


def test_jsonl_values_without_a_json_number_read_back_with_float(tmp_path):
    sink = JsonlSink(tmp_path)
    sink.log({"nan": math.nan, "inf": math.inf, "low": -math.inf}, step=1)
    line = json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=pytest.fail)
    assert math.isnan(float(line["nan"])) and float(line["inf"]) == math.inf and float(line["low"]) == -math.inf


def test_a_resumed_run_drops_what_it_will_make_again_and_a_torn_line(tmp_path):
    first = JsonlSink(tmp_path)
    for step in range(1, 6):
        first.log({"loss": float(step)}, step)
        first.text("val", [{"prompt": "p\n", "score": 1.0}], step)
    first.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"loss": 6.0, "st')

    second = JsonlSink(tmp_path)
    second.truncate_from(4)
    second.log({"loss": 40.0}, 4)
    second.close()
    assert [(r["step"], r["loss"]) for r in read_lines(tmp_path / "metrics.jsonl")] == [
        (1, 1.0),
        (2, 2.0),
        (3, 3.0),
        (4, 40.0),
    ]
    assert [r["step"] for r in read_lines(tmp_path / "samples.jsonl")] == [1, 2, 3]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["metrics.jsonl", "samples.jsonl"]


def test_a_resumed_run_keeps_lines_with_any_text_and_drops_what_is_no_record(tmp_path):
    text = "one\u2028two\x85three\x0cfour"  # each ends a line for str.splitlines, none does in JSON lines
    first = JsonlSink(tmp_path)
    first.text("val", [{"response": text}], 1)
    first.log({"loss": 1.0}, 1)
    first.close()
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(b"\xff\xfe\x00garbage\n[1]\n" + b'{"step": Infinity}\n')

    second = JsonlSink(tmp_path)
    second.truncate_from(2)
    second.close()
    (line,) = (tmp_path / "samples.jsonl").read_text(encoding="utf-8").split("\n")[:-1]
    assert json.loads(line)["response"] == text
    assert [r["step"] for r in read_lines(tmp_path / "metrics.jsonl")] == [1]


def test_a_new_run_in_an_old_folder_keeps_the_old_lines_aside(tmp_path):
    for value in (1.0, 2.0, 3.0):
        sink = JsonlSink(tmp_path)
        sink.log({"loss": value}, 1)
        sink.close()
    kept = {p.name: read_lines(p)[0]["loss"] for p in tmp_path.iterdir()}
    assert kept == {"metrics.jsonl": 3.0, "metrics.1.jsonl": 1.0, "metrics.2.jsonl": 2.0}


# --- console -------------------------------------------------------------------------------------------


def plain_console():
    out = io.StringIO()
    return Console(file=out, soft_wrap=True, highlight=False, width=80, force_terminal=False), out


def test_without_a_terminal_each_iteration_is_one_line_with_the_time_left():
    console, out = plain_console()
    times = iter([0.0, 10.0, 30.0])
    sink = ConsoleSink(10, console=console, clock=lambda: next(times))
    sink.log(PPO_METRICS, 1)
    sink.log(PPO_METRICS, 2)
    sink.log({"val-core/gsm8k/acc": 0.25, "loss[x]": 1.0}, 3)
    sink.close()
    assert out.getvalue().splitlines() == [
        f"[1/10]  {PPO_LINE}",
        f"[2/10]  {PPO_LINE}  eta 0:01:20",
        "[3/10]  val-core/gsm8k/acc 0.25  eta 0:01:45",
    ]


def test_with_a_terminal_a_bar_shows_the_progress():
    out = io.StringIO()
    sink = ConsoleSink(10, "exp", console=Console(file=out, force_terminal=True, width=120, soft_wrap=True))
    sink.truncate_from(4)
    sink.log(PPO_METRICS, 4)
    sink.close()
    assert "score 0.500" in out.getvalue() and "4/10" in out.getvalue() and "exp" in out.getvalue()


def test_the_summary_shows_what_there_is_and_nan_as_nan():
    assert summary({"train/loss": math.nan, "train/grad_norm": 2.0}) == ["loss nan", "gnorm 2"]
    assert summary({}) == []


def test_console_samples_are_one_shortened_line_each_and_not_markup():
    console, out = plain_console()
    ConsoleSink(None, console=console).text("val", [{"prompt": "[bold]1+1\n=", "response": "x" * 999, "score": 0.5}], 7)
    (line,) = out.getvalue().splitlines()
    assert line.startswith("  val @7 | prompt: [bold]1+1 = | response: xxx") and line.endswith("… | score: 0.5")
    assert len(line) < 400


# --- tensorboard ---------------------------------------------------------------------------------------


def scalars(folder, tag):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return [(e.step, e.value) for e in events.Scalars(tag)]


def test_tensorboard_holds_scalars_and_forgets_the_steps_that_a_resumed_run_repeats(tmp_path):
    first = build_sinks(["tensorboard"], tmp_path, "p", "e", {"actor": {"lr": 1}}, 3)
    for step in (1, 2, 3):
        first.log({"loss": float(step)}, step)
    first.text("val", [{"prompt": "a|b", "score": 1.0}], 3)
    first.close()
    second = build_sinks(["tensorboard"], tmp_path, "p", "e", {}, 3)
    second.truncate_from(2)
    second.log({"loss": 20.0}, 2)
    second.close()
    assert scalars(tmp_path / "tensorboard", "loss") == [(1, 1.0), (2, 20.0)]


def test_sample_tables_survive_any_text():
    rows = [{"prompt": "a|b\nc <i>&", "score": 0.123456}, {"response": "only"}]
    assert markdown_table(rows).splitlines() == [
        "| prompt | score | response |",
        "| --- | --- | --- |",
        "| a&#124;b<br>c &lt;i>&amp; | 0.1235 |  |",
        "|  |  | only |",
    ]


# --- services behind extras ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_missing_service_names_its_extra(name, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UserError, match=rf"trainer.logger asks for {name}.*pip install 'megappo\[{name}\]'"):
        build_sinks([name], tmp_path, "p", "e", {}, None)


def test_a_service_whose_import_breaks_is_a_user_error(tmp_path, monkeypatch):
    (tmp_path / "wandb.py").write_text("raise RuntimeError('bad protobuf')")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    with pytest.raises(UserError, match="does not import: RuntimeError: bad protobuf"):
        build_sinks(["wandb"], tmp_path, "p", "e", {}, None)


class FakeService:
    """Records calls to any method, as `wandb`/`mlflow` modules and their runs."""

    def __init__(self, calls, name=""):
        self.calls, self.name = calls, name
        self.id = "run7"
        self.info = types.SimpleNamespace(run_id="run7")

    def __getattr__(self, name):
        def record(*args, **kwargs):
            self.calls.append((name, args, kwargs))
            return FakeService(self.calls)

        return record


def test_wandb_steps_may_go_back_and_a_resumed_run_continues_the_same_one(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setitem(sys.modules, "wandb", FakeService(calls))
    sinks = build_sinks(["wandb"], tmp_path, "proj", "exp", {"a": 1}, None)
    sinks.log({"loss": 1.0}, 5)
    sinks.close()
    assert [name for name, *_ in calls] == ["init", "define_metric", "log", "finish"]
    assert calls[0][2] == {"project": "proj", "name": "exp", "config": {"a": 1}, "dir": str(tmp_path)}
    assert calls[2][1] == ({"loss": 1.0, "step": 5},)

    calls.clear()
    again = build_sinks(["wandb"], tmp_path, "proj", "exp", {"a": 1}, None)
    again.truncate_from(4)
    again.text("val", [{"prompt": "p", "score": 1.0}], 4)
    (init,) = (settings for name, _, settings in calls if name == "init")
    assert init["id"] == "run7" and init["resume"] == "allow"
    assert ("Table", (), {"columns": ["prompt", "score"], "data": [["p", 1.0]]}) in calls


def test_mlflow_gets_names_that_it_accepts_and_resumes(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setitem(sys.modules, "mlflow", FakeService(calls))
    sinks = build_sinks(["mlflow"], tmp_path, "proj", "exp", {"a": 1}, None)
    sinks.log({"val-core/gsm8k/acc@1": 0.5}, 2)
    sinks.close()
    assert [name for name, *_ in calls] == [
        "set_experiment",
        "start_run",
        "log_dict",
        "log_metrics",
        "end_run",
    ]
    assert calls[3][1:] == (({"val-core/gsm8k/acc_1": 0.5},), {"step": 2})
    calls.clear()
    again = build_sinks(["mlflow"], tmp_path, "proj", "exp", {"a": 1}, None)
    again.truncate_from(1)
    again.log({"x": 1.0}, 1)
    assert calls[1] == ("start_run", (), {"run_id": "run7"})


def test_a_service_that_goes_down_does_not_stop_training_but_a_full_disk_does(tmp_path, capsys):
    class Broken:
        def log(self, metrics, step):
            raise OSError("down")

    class Remote(Broken):
        best_effort = True

    remote = Sinks([Remote(), JsonlSink(tmp_path)])
    remote.log({"a": 1.0}, 1)
    remote.log({"a": 2.0}, 2)
    assert capsys.readouterr().err == "warning: Remote failed and is off from here: OSError: down\n"
    assert len(read_lines(tmp_path / "metrics.jsonl")) == 2
    with pytest.raises(OSError, match="down"):
        Sinks([Broken()]).log({"a": 1.0}, 1)


def test_unknown_and_repeated_names(tmp_path):
    with pytest.raises(UserError, match="'tensorbord' is not a logger; choose from console, tensorboard"):
        build_sinks(["tensorbord"], tmp_path, "p", "e", {}, None)
    assert len(build_sinks(["jsonl", "jsonl"], tmp_path, "p", "e", {}, None).sinks) == 1
