"""The guard when things go wrong in other ways: killed in the middle of a rollback, collapsed, rewards that fail."""

from __future__ import annotations

import json
import os
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch
import torch.distributed as dist
from ppo_case import config_of, read_metrics, write_case
from warm_ranks import on_ranks

from megappo.checkpoint.distributed import load_engine
from megappo.checkpoint.store import CheckpointStore
from megappo.errors import UserError
from megappo.trainer import recover
from megappo.trainer.guard_check import check_run
from megappo.trainer.ppo import run_ppo
from megappo.trainer.setup import build_engine

REWARDS = """
CALLS = 0


def mixture(data_source, solution_str, ground_truth, extra_info):
    '''Needs two kinds of tokens: a policy that says one thing only gets half.'''
    return (min(solution_str.count("9"), 3) + min(solution_str.count("4"), 3)) / 6


def sometimes_nan(data_source, solution_str, ground_truth, extra_info):
    '''NaN throughout the third iteration of 24 responses.'''
    global CALLS
    CALLS += 1
    return float("nan") if 48 < CALLS <= 72 else mixture(data_source, solution_str, ground_truth, extra_info)
"""
GROUPS = {"algorithm__adv_estimator": "grpo", "rollout__n": 4, "actor__ppo_epochs": 2, "actor__use_kl_loss": False}
LEARNING = {**GROUPS, "algorithm__use_kl_in_reward": False, "actor__optim__lr": 3e-3, "trainer__save_freq": 1}


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    file = write_case(tmp_path_factory.mktemp("recovery"), layers=2)
    (file.parent / "more.py").write_text(REWARDS)
    return file


def reward(yaml_file, name: str, **settings) -> list[dict]:
    return [{"type": "function", "path": f"{yaml_file.parent / 'more.py'}:{name}", **settings}]


def settings(yaml_file, out: str, changes: dict):
    places = {"trainer__output_dir": str(yaml_file.parent / out)}
    return config_of(yaml_file, dist.get_world_size(), **{**places, **changes})


def go(yaml_file, out: str, changes: dict) -> None:
    os.environ["NO_PROXY"] = "127.0.0.1"
    run_ppo(settings(yaml_file, out, changes))


def read_events(folder) -> list[dict]:
    return [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]


def steady(line: dict) -> dict:
    return {key: value for key, value in line.items() if not key.startswith(("timing_s/", "perf/", "sync/seconds"))}


# --- a collapsed policy --------------------------------------------------------------------------------

COLLAPSE = {
    "trainer__total_iterations": 12,
    "schedules": {
        "actor.optim.lr": {"shape": "stages", "stages": [[0.33, 3e-3], [0.41, 1.0], [1.0, 3e-3]]},
    },
}
BACK = {
    "guard__stable_after": 2,
    "guard__rules": [
        {
            "name": "collapse",
            "metric": "actor/entropy",
            "below": 0.2,
            "actions": [
                {"scale": {"key": "actor.optim.lr", "by": 0.5}},
                {"set": {"key": "actor.entropy_coeff", "to": 0.01}},
                {"set": {"key": "rollout.temperature", "to": 1.1}},
                "rollback",
            ],
        }
    ],
}


def test_a_policy_collapsed_to_zero_entropy_is_brought_back_and_ends_better(case):
    """A step with learning rate 1 leaves a policy that says one thing; half of the reward is all it will ever get."""
    common = {**LEARNING, **COLLAPSE, "rewards": reward(case, "mixture"), "actor__entropy_coeff": 0.0}
    for out, changes in (("collapsed", {}), ("revived", BACK)):
        on_ranks(1, go, case, out, {**common, **changes}, timeout=200)
    collapsed, revived = read_metrics(case.parent / "collapsed"), read_metrics(case.parent / "revived")
    start = revived[0]["critic/score/mean"]
    assert collapsed[-1]["actor/entropy"] < 1e-6 and collapsed[-1]["critic/score/mean"] <= 0.5
    (event,) = read_events(case.parent / "revived")
    assert event["rule"] == "collapse" and revived[event["step"] - 1]["actor/entropy"] < 1e-6
    after = revived[event["step"] :]
    assert all(line["actor/entropy"] > 1 for line in after)
    assert all(line["schedule/rollout.temperature"] == 1.1 for line in after)
    assert all(line["schedule/actor.entropy_coeff"] == 0.01 for line in after)
    assert revived[-1]["critic/score/mean"] > max(start + 0.2, collapsed[-1]["critic/score/mean"])
    # What `megappo guard check` says of the run is what its guard said.
    found = check_run(case.parent / "revived")
    assert [(e.step, e.rule) for e in found.events] == [(event["step"], "collapse")] and found.missing == []
    assert found.events[0].record() == event
    # The unguarded run has its own rules, none; with the other's it shows where the guard would have stepped in.
    tried = check_run(case.parent / "collapsed", case.parent / "revived/config.yaml")
    assert tried.events[0].step == event["step"] and tried.really is None


# --- killed between going back and saving ------------------------------------------------------------------

JUMP = {
    "trainer__total_iterations": 5,
    "trainer__save_freq": 1,
    "actor__ppo_epochs": 1,
    "guard__stable_after": 1,
    "guard__rules": [
        {
            "name": "once",
            "metric": "training/global_step",
            "above": 2.5,
            "cooldown": 1000,
            "actions": [{"scale": {"key": "actor.optim.lr", "by": 0.5}}, "rollback"],
        }
    ],
}


class Killed(Exception):
    pass


def killed_while_going_back(yaml_file, out: str) -> list[int]:
    """Everything is loaded, nothing saved; returns the checkpoints that are there."""
    real = recover.save_run

    def save_run(run, **options):
        if run.iteration > 0:
            raise Killed
        real(run, **options)

    recover.save_run = save_run
    try:
        go(yaml_file, out, JUMP)
    except Killed:
        return CheckpointStore(yaml_file.parent / out / "checkpoints").iterations()
    finally:
        recover.save_run = real
    raise AssertionError("nothing went back")


@pytest.mark.parametrize("world", [1, 2])
def test_a_run_killed_while_going_back_decides_the_same_again(case, world):
    on_ranks(world, go, case, f"whole{world}", JUMP, timeout=200)
    left = on_ranks(world, killed_while_going_back, case, f"killed{world}", timeout=200)
    assert max(left) == 2  # the third iteration was not saved
    on_ranks(world, go, case, f"killed{world}", JUMP, timeout=200)
    whole, again = (case.parent / f"{name}{world}" for name in ("whole", "killed"))
    assert [steady(line) for line in read_metrics(again)] == [steady(line) for line in read_metrics(whole)]
    assert read_events(again) == read_events(whole) and len(read_events(whole)) == 1
    assert [line["guard/rollbacks"] for line in read_metrics(again)] == [0, 0, 1, 1, 1]
    stores = [CheckpointStore(folder / "checkpoints") for folder in (whole, again)]
    assert stores[0].iterations() == stores[1].iterations()
    assert stores[0].stable_iteration() == stores[1].stable_iteration()


# --- latest, and the same data again -----------------------------------------------------------------------


def prompts_of(folder, iteration: int) -> list[list[int]]:
    lines = (folder / f"rollouts_{iteration:06d}.jsonl").read_text().splitlines()
    return [json.loads(line)["prompt_ids"] for line in lines]


def same_weights(yaml_file, first: str, second: str) -> bool:
    config = config_of(yaml_file)
    engine = build_engine(config.model.path, config.actor.parallel, config.model, optim=config.actor.optim)
    found = []
    for folder in (first, second):
        load_engine(engine, yaml_file.parent / folder / "actor")
        found.append({name: tensor.clone() for name, tensor in engine.stream_weights(torch.float32)})
    return all(torch.equal(found[0][name], tensor) for name, tensor in found[1].items())


@pytest.mark.parametrize("again", [True, False])
def test_rollback_to_the_latest_checkpoint_uses_data_again_only_if_asked(case, again):
    """The third iteration goes back to the second's checkpoint, which was never stable."""
    name = f"latest{again}"
    rules = [{**JUMP["guard__rules"][0], "actions": [{"rollback": "latest", "skip_data": not again}]}]
    record = {"rollout__record_dir": str(case.parent / name / "rollouts"), "trainer__max_ckpt_to_keep": 9}
    changes = {**JUMP, **record, "guard__rules": rules, "guard__stable_after": 9, "trainer__total_iterations": 4}
    on_ranks(1, go, case, name, changes)
    (event,) = read_events(case.parent / name)
    assert event["step"] == 3 and event["actions"] == [{"rollback": "latest", "skip_data": not again}]
    folder = case.parent / name / "rollouts"
    third, fourth = prompts_of(folder, 2), prompts_of(folder, 3)
    assert (fourth == third) == again
    kept = f"{name}/checkpoints/iter_00000"
    assert on_ranks(1, same_weights, case, f"{kept}3", f"{kept}2")  # saved at once, with the second's weights
    assert not on_ranks(1, same_weights, case, f"{kept}3", f"{kept}1")
    assert CheckpointStore(case.parent / name / "checkpoints").stable_iteration() == 0


def test_two_ranks_restore_the_same_moments(case):
    rule = {"name": "calm", "metric": "critic/vf_loss", "above": -1, "after": 1, "actions": ["restore_optimizer"]}
    changes = {**JUMP, "guard__rules": [rule], "trainer__total_iterations": 3}
    for world, out in ((1, "moments1"), (2, "moments2")):
        on_ranks(world, go, case, out, changes, timeout=200)
    on_ranks(1, go, case, "unrestored", {**changes, "guard__rules": []})
    one, two, without = (read_metrics(case.parent / out) for out in ("moments1", "moments2", "unrestored"))
    assert [line["guard/events"] for line in two] == [0, 1, 1]
    for a, b in zip(one, two, strict=True):
        for name in ("actor/loss", "actor/grad_norm", "critic/vf_loss", "critic/grad_norm", "actor/entropy"):
            assert b[name] == pytest.approx(a[name], rel=1e-3, abs=1e-5), name
    # Restored after the second iteration: the third differs from one that goes on with its own moments.
    assert one[1]["critic/vf_loss"] == without[1]["critic/vf_loss"]
    assert one[2]["critic/vf_loss"] != without[2]["critic/vf_loss"]


# --- rewards that fail ---------------------------------------------------------------------------------

NO_UPDATE = {
    "guard__rules": [
        {"name": "no_scores", "metric": "reward/*/failed_share", "above": 0.5, "actions": ["skip_update", "warn"]}
    ]
}


def refused(yaml_file, out: str, changes: dict) -> str:
    try:
        go(yaml_file, out, changes)
    except UserError as error:
        return str(error)
    raise AssertionError("it went on")


@pytest.mark.parametrize("on_error", ["drop", "neutral"])
def test_a_reward_that_returns_nan_costs_one_iteration_under_the_guard(case, on_error):
    rewards = reward(case, "sometimes_nan", on_error=on_error)
    changes = {**LEARNING, **NO_UPDATE, "rewards": rewards, "trainer__total_iterations": 8}
    on_ranks(1, go, case, f"nan_{on_error}", changes, timeout=200)
    lines = read_metrics(case.parent / f"nan_{on_error}")
    assert [line["training/update_skipped"] for line in lines] == [0, 0, 1, 0, 0, 0, 0, 0]
    assert [line["reward/sometimes_nan/failed_share"] for line in lines][:4] == [0, 0, 1, 0]
    assert "actor/lr" not in lines[2] and lines[3]["actor/lr"] > 0
    (event,) = read_events(case.parent / f"nan_{on_error}")
    assert (event["step"], event["metric"], event["value"]) == (3, "reward/sometimes_nan/failed_share", 1.0)
    assert lines[-1]["critic/score/mean"] > lines[0]["critic/score/mean"] + 0.1


def test_a_reward_that_returns_nan_ends_the_run_by_default(case):
    said = on_ranks(1, refused, case, "nan_fail", {**LEARNING, "rewards": reward(case, "sometimes_nan")})
    assert "sometimes_nan" in said and "nan, not a finite number" in said and "\n" not in said
    assert len(read_metrics(case.parent / "nan_fail")) == 2  # what was before is logged


class Judge:
    """Scores by the share of 9; dead (503) for all posts from number `dies` on, until `lives`."""

    def __init__(self, dies: int, lives: float = float("inf")):
        self.dies, self.lives, self.posts = dies, lives, 0
        judge = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                samples = json.loads(self.rfile.read(int(self.headers["content-length"])))["samples"]
                dead = judge.dies <= judge.posts < judge.lives
                judge.posts += 1
                scores = [sample["response"].count("9") / 6 for sample in samples]
                self.answer(503 if dead else 200, json.dumps({"scores": scores}))

            def do_GET(self):
                self.answer(405, "")

            def answer(self, status, text):
                self.send_response(status)
                self.send_header("content-length", str(len(text)))
                self.end_headers()
                self.wfile.write(text.encode())

            def log_message(self, *_):
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)

    def __enter__(self) -> Judge:
        self.thread.start()
        return self

    def __exit__(self, *_) -> None:
        self.http.shutdown()
        self.http.server_close()
        self.thread.join(10)

    def reward(self, **settings) -> list[dict]:
        url = f"http://127.0.0.1:{self.http.server_address[1]}/score"
        quick = {"retries": 0, "backoff_s": 0.001, "concurrency": 1, "batch_size": 100}
        return [{"type": "remote", "name": "judge", "url": url, **quick, **settings}]


@pytest.mark.parametrize("on_error", ["drop", "neutral"])
def test_a_run_outlives_a_reward_server_that_dies_and_comes_back(case, on_error):
    """One post an iteration: the server is dead in the third and the fourth. The guard lets neither train."""
    with Judge(dies=2, lives=4) as judge:
        rewards = judge.reward(on_error=on_error, breaker_failures=3)
        changes = {**LEARNING, **NO_UPDATE, "rewards": rewards, "trainer__total_iterations": 8}
        on_ranks(1, go, case, f"dead_{on_error}", changes, timeout=200)
    lines = read_metrics(case.parent / f"dead_{on_error}")
    assert [line["reward/judge/failed_share"] for line in lines] == [0, 0, 1, 1, 0, 0, 0, 0]
    assert [line["training/update_skipped"] for line in lines] == [0, 0, 1, 1, 0, 0, 0, 0]
    assert [line["reward/judge/dropped"] for line in lines][2:4] == ([24, 24] if on_error == "drop" else [0, 0])
    assert [event["step"] for event in read_events(case.parent / f"dead_{on_error}")] == [3, 4]
    assert judge.posts == 8
    assert lines[-1]["critic/score/mean"] > lines[0]["critic/score/mean"] + 0.1


def test_the_breaker_leaves_a_dead_server_alone_and_the_guard_stops_the_run(case):
    with Judge(dies=1) as judge:
        stop = [{**NO_UPDATE["guard__rules"][0], "patience": 3, "message": "the judge is dead", "actions": ["stop"]}]
        rewards = judge.reward(on_error="drop", breaker_failures=1, breaker_pause_s=1000)
        changes = {**LEARNING, "rewards": rewards, "guard__rules": stop, "trainer__total_iterations": 8}
        said = on_ranks(2, stopped, case, "breaker", changes, timeout=200)
    assert "the judge is dead" in said and "after iteration" in said
    lines = read_metrics(case.parent / "breaker")
    failed = [line["reward/judge/failed_share"] for line in lines]
    assert failed[-3:] == [1, 1, 1] and len(lines) < 8
    assert sum(line["reward/judge/breaker_opened"] for line in lines) == 2  # one breaker a rank
    assert judge.posts <= 4  # of 2 ranks x iterations: after a failure none is sent


def stopped(yaml_file, out: str, changes: dict) -> str:
    from megappo.errors import Interrupted

    try:
        go(yaml_file, out, changes)
    except Interrupted as stop:
        return str(stop)
    raise AssertionError("the run went on")


def test_a_dead_reward_server_ends_the_run_by_default_and_it_can_be_resumed(case):
    changes = {**LEARNING, "trainer__total_iterations": 4}
    with Judge(dies=2) as judge:
        said = on_ranks(1, refused, case, "ended", {**changes, "rewards": judge.reward()})
        assert said.startswith("reward 'judge'") and "503" in said and "\n" not in said
    with Judge(dies=99) as judge:
        on_ranks(1, go, case, "ended", {**changes, "rewards": judge.reward()})
    assert [line["step"] for line in read_metrics(case.parent / "ended")] == [1, 2, 3, 4]
