"""`megappo report`: what the page shows, from folders as runs leave them, damaged and odd ones included."""

import json
import math
import re
import sys

import numpy as np
import pytest
import yaml

from megappo.errors import UserError
from megappo.observe.failures import run_app
from megappo.observe.report import write_report
from megappo.observe.report.charts import charts_for
from megappo.observe.report.curves import BUCKETS, Curve, smooth, thin
from megappo.observe.report.draw import draw, style
from megappo.observe.report.numbers import differences, duration, final_table
from megappo.observe.report.runs import hide_secrets, load_run, load_runs
from megappo.observe.report.samples import Sample, by_quantile, sample_groups
from megappo.observe.report.thresholds import thresholds_of
from megappo.observe.report.timing import phases
from megappo.observe.sinks.jsonl import JsonlSink
from megappo.observe.sinks.tensorboard import TensorboardSink
from megappo.trainer.guard import Event
from megappo_cli.main import app


def metrics_at(step, **more):
    return {"critic/score/mean": 0.1 * step, "critic/score/std": 0.2, "critic/score/median": 0.05 * step} | more


def write_run(folder, rows, *, tail="", samples=(), events=(), config=None):
    """A run folder with `rows` of metrics at steps 1, 2, … (a row's own `step` wins)."""
    sink = JsonlSink(folder)
    for step, row in enumerate(rows, 1):
        sink.log({name: value for name, value in row.items() if name != "step"}, row.get("step", step))
    for step, sample in samples:
        sink.text("val/generations", [sample], step)
    sink.close()
    if tail:
        with (folder / "metrics.jsonl").open("a") as file:
            file.write(tail)
    if events:
        (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    if config is not None:
        (folder / "config.yaml").write_text(yaml.safe_dump(config))
    return folder


def simple_run(folder, steps=4, **more):
    return write_run(folder, [metrics_at(i) for i in range(1, steps + 1)], **more)


def charts_of(*runs):
    return {chart.key: chart for chart in charts_for(runs, thresholds_of(runs))}


# --- the page -------------------------------------------------------------------------------------------


def test_page_needs_nothing_from_outside(tmp_path):
    page = write_report([simple_run(tmp_path / "run")]).read_text()
    assert "default-src 'none'" in page and "<script" not in page and "<link" not in page
    assert all(source.startswith("data:image/svg+xml;base64,") for source in re.findall(r'src="([^"]*)"', page))
    assert not re.search(r"https?://", page) and "url(" not in page and "@import" not in page


def test_page_is_beside_the_metrics_and_charts_are_files_on_request(tmp_path):
    run = simple_run(tmp_path / "run")
    assert write_report([run], png=tmp_path / "png") == run / "report.html"
    files = sorted((tmp_path / "png").iterdir())
    assert [file.name for file in files] == ["01_score.png"]
    assert files[0].read_bytes().startswith(b"\x89PNG")


def test_the_same_run_gives_the_same_charts(tmp_path):
    run = simple_run(tmp_path / "run")
    pages = [write_report([run], tmp_path / f"{i}.html").read_text() for i in range(2)]
    images = [re.findall(r'src="([^"]*)"', page) for page in pages]
    assert images[0] == images[1] != []


def test_texts_of_a_run_are_escaped(tmp_path):
    evil = "<script>alert('x')</script>&\"<img src=x onerror=alert(1)>"
    sample = {"prompt": evil, "response": evil, "score": 1.0, "source": evil, "ground_truth": evil}
    run = simple_run(
        tmp_path / "<b>run",
        samples=[(1, sample)],
        events=[{"step": 2, "rule": evil, "metric": evil, "value": 1.0, "actions": [evil], "message": evil}],
        config={"trainer": {"experiment_name": evil}},
    )
    page = write_report([run]).read_text()
    assert "<script" not in page and "<img src=x" not in page and "<b>run" not in page
    assert page.count("&lt;script&gt;") >= 9


def test_one_iteration_makes_a_whole_report(tmp_path):
    row = metrics_at(1) | {
        "actor/reward_kl_penalty": 0.0,
        "timing_s/step": 2.0,
        "timing_s/gen": 1.0,
        "actor/entropy": 0.0,
    }
    page = write_report([write_run(tmp_path / "run", [row])]).read_text()
    assert page.count("<figure>") == 4 and "1 to 1" in page


def test_names_that_mean_something_to_the_drawing_library(tmp_path):
    runs = [simple_run(tmp_path / name) for name in ("$a_b$", "_hidden", "中文")]
    page = write_report(runs, tmp_path / "out.html").read_text()
    assert "$a_b$" in page and "3 training runs" in page


# --- reading runs ---------------------------------------------------------------------------------------


def test_cut_last_line_is_left_out_with_a_note(tmp_path):
    run = load_run(simple_run(tmp_path / "run", tail='{"step": 5, "critic/sco'), "run")
    assert run.span == (1, 4)
    assert [note for note in run.notes if "last line was cut off" in note]


def test_damaged_lines_are_counted(tmp_path):
    folder = simple_run(tmp_path / "run", tail='nonsense\n[1]\n{"critic/score/mean": 1}\n')
    notes = " ".join(load_run(folder, "run").notes)
    assert "2 damaged line(s) left out, the first is line 5" in notes and "1 line(s) without a step" in notes


def test_values_that_are_no_numbers_are_kept_apart(tmp_path):
    rows = [metrics_at(i, **{"actor/grad_norm": value}) for i, value in enumerate((1.0, math.nan, math.inf, 2.0), 1)]
    run = load_run(write_run(tmp_path / "run", rows), "run")
    curve = run.curves["actor/grad_norm"]
    assert curve.broken().tolist() == [2, 3] and curve.finite().tolist() == [1.0, 2.0]
    assert "actor/grad_norm (2×)" in " ".join(run.notes)
    assert final_table([run]).rows[-1] == ["Gradient norm, policy", "1", "2", "1", "2"]
    assert write_report([run.folder]).exists()


def test_a_metric_without_any_number_is_drawn_as_an_empty_chart(tmp_path):
    rows = [metrics_at(i, **{"critic/vf_loss": math.nan}) for i in (1, 2)]
    assert write_report([write_run(tmp_path / "run", rows)]).exists()


def test_late_metrics_keep_their_iterations(tmp_path):
    rows = [metrics_at(i) | ({"actor/kl_loss": 0.01} if i > 2 else {}) for i in (1, 2, 3, 4)]
    run = load_run(write_run(tmp_path / "run", rows), "run")
    assert run.curves["actor/kl_loss"].steps.tolist() == [3, 4]
    with style():
        axes = draw(charts_of(run)["kl_reference"], [run], run.span).axes[0]
    assert axes.get_xlim()[0] <= 1 and axes.get_xlim()[1] >= 4


def test_lines_of_one_iteration_are_joined(tmp_path):
    rows = [{"step": 1, "a": 1.0}, {"step": 1, "b": 2.0}, {"step": 2, "a": 3.0}]
    run = load_run(write_run(tmp_path / "run", rows), "run")
    assert run.curves["a"].steps.tolist() == [1, 2] and run.curves["b"].steps.tolist() == [1]
    assert not run.discarded


def test_iterations_made_again_after_a_resume_replace_the_earlier_ones(tmp_path):
    rows = [{"step": s, "actor/entropy": v} for s, v in ((1, 1.0), (2, 2.0), (3, 3.0), (2, 20.0), (3, 30.0), (4, 40.0))]
    run = load_run(write_run(tmp_path / "run", rows), "run")
    assert run.curves["actor/entropy"].values.tolist() == [1.0, 20.0, 30.0, 40.0]
    assert [part["actor/entropy"].values.tolist() for part in run.discarded] == [[1.0, 2.0, 3.0]]
    with style():
        axes = draw(charts_of(run)["entropy"], [run], run.span).axes[0]
    assert "before a resume" in [text.get_text() for text in axes.get_legend().get_texts()]


def test_what_is_missing_is_said_in_one_line(tmp_path):
    simple_run(tmp_path / "runs" / "a")
    (tmp_path / "empty").mkdir()
    (tmp_path / "bare").mkdir()
    (tmp_path / "empty" / "metrics.jsonl").write_text('{"step": 1')
    for folder, words in (
        (tmp_path / "nowhere", "no such folder: give a run's trainer.output_dir"),
        (tmp_path / "runs" / "a" / "metrics.jsonl", "is a file"),
        (tmp_path / "runs", "did you mean"),
        (tmp_path / "bare", "jsonl in trainer.logger"),
        (tmp_path / "empty", "no complete line"),
    ):
        with pytest.raises(UserError, match=words) as caught:
            write_report([folder])
        assert "\n" not in str(caught.value)


def test_runs_get_the_shortest_names_that_differ(tmp_path):
    folders = [simple_run(tmp_path / a / b) for a, b in (("x", "ppo"), ("y", "ppo"), ("x", "other"))]
    assert [run.name for run in load_runs(folders)] == ["x/ppo", "y/ppo", "x/other"]
    assert load_runs(folders[:1])[0].name == "ppo"
    with pytest.raises(UserError, match="given twice"):
        load_runs([folders[0], folders[0]])
    with pytest.raises(UserError, match="11 run folders"):
        write_report([tmp_path] * 11)


def test_configuration_comes_from_file_then_checkpoint_then_tensorboard(tmp_path):
    run = simple_run(tmp_path / "run")
    assert "configuration was not found" in " ".join(load_run(run, "run").notes)
    sink = TensorboardSink(run, {"trainer": {"seed": 1}})
    sink.log({"a": 1.0}, 1)
    sink.close()
    assert load_run(run, "run").setting("trainer.seed") == 1
    for iteration in (8, 10):
        state = run / "checkpoints" / f"iter_{iteration:06d}" / "state.json"
        state.parent.mkdir(parents=True)
        state.write_text(json.dumps({"config": {"trainer": {"seed": iteration}}}))
    assert load_run(run, "run").setting("trainer.seed") == 10
    (run / "config.yaml").write_text("trainer: {seed: 3}")
    assert load_run(run, "run").setting("trainer.seed") == 3
    assert load_run(run, "run").setting("guard.preset.more") is None


def test_the_start_is_in_the_name_of_the_event_file(tmp_path):
    folder = simple_run(tmp_path / "run")
    (folder / "tensorboard").mkdir()
    (folder / "tensorboard" / "events.out.tfevents.1600000000.host.1.0").touch()
    run = load_run(folder, "run")
    assert run.started == 1600000000.0 and not run.guessed


def test_without_event_files_the_start_is_the_end_minus_the_timings(tmp_path):
    run = load_run(write_run(tmp_path / "run", [{"timing_s/step": 30.0, "timing_s/testing": 10.0}] * 3), "run")
    assert run.guessed and run.ended - run.started == pytest.approx(120.0)


def test_secrets_are_not_handed_on():
    config = {"rewards": [{"api_key": "k", "headers": {"Authorization": "t"}}], "rollout": {"stop_token_ids": [1]}}
    hidden = {"rewards": [{"api_key": "(hidden)", "headers": {"Authorization": "(hidden)"}}]}
    assert hide_secrets(config) == hidden | {"rollout": {"stop_token_ids": [1]}}


# --- curves and charts ----------------------------------------------------------------------------------


def test_thinning_keeps_spikes_and_gaps():
    values = np.sin(np.arange(10_000) / 500)
    values[1234], values[7000] = 50.0, np.nan
    short = thin(Curve(np.arange(10_000), values))
    assert len(short.steps) <= 2 * BUCKETS + 2
    assert short.values[short.steps == 1234] == 50.0 and np.isnan(short.values[short.steps == 7000])
    assert (np.diff(short.steps) > 0).all()


def test_smoothing_leaves_out_what_is_not_finite():
    values = np.full(1000, 2.0)
    values[[10, 500]] = np.nan, np.inf
    assert smooth(Curve(np.arange(1000), values)).values == pytest.approx(np.full(1000, 2.0))


def test_a_spike_makes_no_plateau_in_the_smoothed_curve():
    values = 1 + 0.1 * np.sin(np.arange(5000.0))
    values[2000:2005] = 1e6
    assert np.abs(smooth(Curve(np.arange(5000), values)).values - 1).max() < 0.1
    values[2000:3000] = 1e6  # lasts: that is how the run is
    assert smooth(Curve(np.arange(5000), values)).values[2500] == pytest.approx(1e6)


def test_ten_thousand_iterations_make_a_small_chart(tmp_path):
    rng = np.random.default_rng(0)
    lines = [json.dumps({"step": i, "actor/entropy": float(v)}) for i, v in enumerate(rng.normal(2, 0.1, 10_000))]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    page = write_report([tmp_path]).read_text()
    assert "0 to 9,999" in page and len(page) < 400_000


def test_curves_that_say_the_same_are_drawn_once(tmp_path):
    rows = [metrics_at(i) | {"critic/rewards/mean": 0.1 * i, "actor/pg_loss": 0.5, "actor/loss": 0.5} for i in (1, 2)]
    charts = charts_of(load_run(write_run(tmp_path / "run", rows), "run"))
    assert "reward" not in charts
    assert [line.metric for line in charts["loss_policy"].lines] == ["actor/pg_loss"]


def test_unknown_metrics_that_vary_get_a_chart(tmp_path):
    rows = [{"actor/entropy": 1.0, "new/thing": float(i), "new/constant": 1.0, "training/epoch": i} for i in (1, 2)]
    charts = charts_of(load_run(write_run(tmp_path / "run", rows), "run"))
    assert list(charts) == ["entropy", "other_new_thing"]


def test_data_sources_share_a_chart_in_one_run_and_part_in_several(tmp_path):
    row = {"val/gsm8k/acc": 0.5, "val/open/math/acc": 0.2}
    runs = load_runs([write_run(tmp_path / name, [row]) for name in "ab"])
    assert [line.label for line in charts_of(runs[0])["val_accuracy"].lines] == ["gsm8k", "open/math"]
    titles = [chart.title for chart in charts_of(*runs).values()]
    assert titles == ["Validation accuracy: gsm8k", "Validation accuracy: open/math"]


def test_several_runs_are_told_apart_by_colour_with_a_legend(tmp_path):
    runs = load_runs([simple_run(tmp_path / "a"), simple_run(tmp_path / "b", steps=6)])
    with style():
        axes = draw(charts_of(*runs)["score"], runs, (1, 6)).axes[0]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["a", "b", "mean", "median", "± std"]
    solid = [line for line in axes.get_lines() if line.get_linestyle() == "-" and len(line.get_xdata()) > 2]
    assert len({line.get_color() for line in solid}) == 2
    assert [len(line.get_xdata()) for line in solid] == [4, 6]


def test_an_explosion_makes_the_axis_logarithmic(tmp_path):
    rows = [{"actor/grad_norm": 1e6 if i == 9 else 1.0, "actor/pg_loss": 1e6 if i == 9 else -0.01} for i in range(20)]
    run = load_run(write_run(tmp_path / "run", rows), "run")
    with style():
        scales = {
            key: draw(chart, [run], run.span).axes[0].get_yscale()
            for key, chart in charts_of(run).items()
            if key in ("grad_norm_actor", "loss_policy")
        }
    assert scales == {"grad_norm_actor": "log", "loss_policy": "symlog"}


# --- guard ----------------------------------------------------------------------------------------------


def kl_run(folder, guard=None, **more):
    rows = [{"actor/reward_kl_penalty": 0.01, "actor/grad_norm": 1.0} for _ in range(5)]
    return load_run(write_run(folder, rows, config={"guard": guard} if guard else None, **more), folder.name)


def test_bands_are_those_of_the_guards_preset(tmp_path):
    off, loose = kl_run(tmp_path / "off"), kl_run(tmp_path / "loose", {"preset": "loose"})
    zones = [[(z.low, z.high) for z in charts_of(run)["kl_reference"].zones] for run in (off, loose)]
    assert zones == [[(0.005, 0.015)], [(0.02, 0.08)]]
    values = [[limit.value for limit in charts_of(run)["kl_reference"].limits] for run in (off, loose)]
    assert values == [[0.03, 0.05, 0.002], [0.1]]
    assert "is not on" in thresholds_of([off]).note
    assert "preset loose; other runs differ from loose" in thresholds_of([off, loose]).note


def test_limits_follow_the_runs_own_rules(tmp_path):
    rules = [{"name": "actor_grad_norm", "above": 20.0}, {"name": "kl_drift", "enabled": False}]
    charts = charts_of(kl_run(tmp_path / "run", {"preset": "conservative", "rules": rules}))
    assert [(x.value, x.level) for x in charts["grad_norm_actor"].limits] == [(20.0, "bad")]
    assert 0.05 not in [limit.value for limit in charts["kl_reference"].limits]


def test_a_guard_of_another_version_is_passed_over(tmp_path):
    assert "is not on" in thresholds_of([kl_run(tmp_path / "run", {"preset": "future"})]).note


def test_events_of_the_guard_are_listed_and_marked_on_every_curve(tmp_path):
    actions = (
        {"scale": "actor.optim.lr", "from": 1e-6, "to": 5e-7},
        {"rollback": "stable", "skip_data": True},
        {"outside": "critic/score/max", "value": "nan"},
        {"skip_update": True},
    )
    event = Event(3, "kl_high", "actor/reward_kl_penalty", math.nan, "above 0.03", actions, "too far")
    run = kl_run(tmp_path / "run", events=[event.record()])
    assert run.events[0].actions == (
        "actor.optim.lr 1e-06 → 5e-07, back to the stable checkpoint, "
        "critic/score/max = nan is out of range, skip update"
    )
    page = write_report([run.folder]).read_text()
    for text in ("kl_high", "above 0.03", "too far", "nan", "back to the stable checkpoint"):
        assert text in page
    with style():
        for chart in charts_of(run).values():
            axes = draw(chart, [run], run.span).axes[0]
            verticals = [c for c in axes.collections if [s[:, 0].tolist() for s in c.get_segments()] == [[3.0, 3.0]]]
            assert len(verticals) == 1 and "1" in [text.get_text() for text in axes.texts]


def test_thousands_of_events_stay_readable(tmp_path):
    events = [{"step": i % 5 + 1, "rule": "r", "metric": "m", "value": 1, "actions": []} for i in range(3000)]
    page = write_report([kl_run(tmp_path / "run", events=events).folder]).read_text()
    assert "… and 2500 more in events.jsonl" in page


# --- samples --------------------------------------------------------------------------------------------


def test_samples_run_from_the_lowest_to_the_highest_score():
    samples = [Sample("p", f"r{i}", float(i)) for i in (7, 3, 9, 0, 5, 1, 8, 2, 6, 4, 10)] + [Sample("p", "none", None)]
    chosen = [(name, sample.response) for name, sample in by_quantile(samples)]
    assert chosen == [("lowest", "r0"), ("25 %", "r2"), ("median", "r5"), ("75 %", "r8"), ("highest", "r10")]
    assert [name for name, _ in by_quantile(samples[:2])] == ["lowest", "highest"]
    assert by_quantile([Sample("p", "r", None)]) == [("", Sample("p", "r", None))]
    assert by_quantile([]) == []


def test_samples_of_the_last_and_the_first_evaluation_are_shown(tmp_path):
    made = [
        (step, {"prompt": "p", "response": f"at {step}", "score": "nan" if step == 4 else 1.0}) for step in (0, 2, 4)
    ]
    groups = sample_groups(load_run(simple_run(tmp_path / "run", samples=made), "run"))
    assert [group.title for group in groups] == ["val/generations, iteration 4", "val/generations, iteration 0"]
    assert [group.chosen[0][1].response for group in groups] == ["at 4", "at 0"]


def test_long_texts_are_cut(tmp_path):
    run = load_run(simple_run(tmp_path / "run", samples=[(1, {"response": "x" * 9000, "score": 1})]), "run")
    assert sample_groups(run)[0].chosen[0][1].response.endswith("x … (5000 more characters)")


def record_rollouts(folder, iteration, **more):
    folder.mkdir(exist_ok=True)
    lines = [
        {"prompt_ids": [0, 1], "response_ids": [i], "logprobs": [-float(i)], "sample_id": i} | more for i in range(3)
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / f"rollouts_{iteration:06d}.jsonl").write_text(text)


def test_recorded_rollouts_are_decoded_and_sorted_by_log_prob(tmp_path):
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    tokenizer = Tokenizer(WordLevel({"zero": 0, "one": 1, "two": 2}, unk_token="zero"))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    for iteration in (0, 7):
        record_rollouts(tmp_path / "rec", iteration)
    config = {"rollout": {"record_dir": str(tmp_path / "rec")}, "model": {"tokenizer_path": str(tmp_path)}}
    groups = sample_groups(load_run(simple_run(tmp_path / "run", config=config), "run"))
    assert [group.title for group in groups] == ["recorded rollouts, iteration 8", "recorded rollouts, iteration 1"]
    assert [(name, s.response, s.score) for name, s in groups[0].chosen] == [
        ("lowest", "two", -2.0),
        ("median", "one", -1.0),
        ("highest", "zero", 0.0),
    ]
    assert groups[0].chosen[0][1].prompt == "zero one" and "log-prob" in groups[0].by


def test_recorded_rollouts_without_their_tokenizer_are_shown_as_ids(tmp_path):
    record_rollouts(tmp_path / "rec", 0, score=0.5)
    config = {"rollout": {"record_dir": str(tmp_path / "rec")}, "model": {"path": str(tmp_path / "gone")}}
    run = load_run(simple_run(tmp_path / "run", config=config), "run")
    (group,) = sample_groups(run)
    assert group.by == "score" and group.chosen[0][1].prompt == "0 1"
    assert "shown as token ids" in " ".join(run.notes)


# --- tables ---------------------------------------------------------------------------------------------


def test_timings_add_up_to_the_iteration(tmp_path):
    rows = [{"timing_s/step": 10.0, "timing_s/gen": 6.0, "timing_s/adv": 0.001} for _ in range(3)]
    rows[1]["timing_s/testing"] = 5.0
    parts = phases(load_run(write_run(tmp_path / "run", rows), "run"))
    assert list(parts) == ["gen", "testing", "other"]
    assert sum(parts.values()).tolist() == pytest.approx([10.0, 15.0, 10.0])


def test_settings_that_differ_are_listed(tmp_path):
    configs = [{"actor": {"optim": {"lr": lr}, "clip": 0.2}} for lr in (1e-6, 2e-6)]
    runs = load_runs([simple_run(tmp_path / str(i), config=config) for i, config in enumerate(configs)])
    assert differences(runs) == [["actor.optim.lr", "1e-06", "2e-06"]]


def test_durations_are_short():
    assert [duration(s) for s in (5, 65, 7265)] == ["5 s", "1 min 5 s", "2 h 1 min"]


# --- the command ----------------------------------------------------------------------------------------


def test_command_writes_the_page_and_says_where(tmp_path, capsys):
    run, out = simple_run(tmp_path / "run"), tmp_path / "new" / "page.html"
    assert run_app(app, ["report", str(run), "--out", str(out)]) == 0
    assert capsys.readouterr().out == f"report: {out}\n" and out.stat().st_size > 5000
    assert run_app(app, ["report", str(tmp_path / "gone")]) == 2
    assert capsys.readouterr().err.startswith("error: ")
    assert run_app(app, ["report", str(run), "--out", str(tmp_path)]) == 2
    assert "is a folder: give --out a file name" in capsys.readouterr().err


def test_command_without_matplotlib_says_what_to_install(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert run_app(app, ["report", str(simple_run(tmp_path / "run"))]) == 2
    assert "pip install 'megappo[report]'" in capsys.readouterr().err
