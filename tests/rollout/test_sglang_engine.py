"""The SGLang engine against stub servers that misbehave: nothing lost, nothing doubled, clear ends."""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager

import pytest
import torch
from sglang_stub import PseudoModel, Stub, serving

from megappo.config.schema.rollout import SGLangConfig
from megappo.errors import UserError
from megappo.rollout.base import GenerateRequest, RolloutLost, SamplingParams
from megappo.rollout.sglang.engine import SGLangEngine
from megappo.rollout.sglang.servers import Pool
from megappo.rollout.sglang.weights import DiskWay, TensorWay

SAMPLING = SamplingParams(max_new_tokens=8, stop_token_ids=(2,))
SHAPES = {"b.bias": (5,), "w.weight": (4, 5)}
QUICK = {"down_timeout_s": 2.0, "health_interval_s": 0.2, "health_timeout_s": 2.0, "timeout_s": 20.0, "retries": 2}


@pytest.fixture(autouse=True)
def quick_pauses(monkeypatch):
    monkeypatch.setattr("megappo.rollout.sglang.client._BACKOFF_S", 0.005)


def weights(value: float):
    return [(name, torch.full(shape, value)) for name, shape in SHAPES.items()]


def requests(groups=6, n=4, first=100):
    out = []
    for group in range(groups):
        prompt = [3 + group, 4, 5][: 1 + group % 3]
        out += [GenerateRequest(first + group * n + k, group, prompt, 7919 * (group * n + k)) for k in range(n)]
    return out


@contextmanager
def engine_on(*stubs, way=None, synced=True, **changes):
    with serving(*stubs) as urls:
        settings = SGLangConfig(**QUICK | changes)
        pool = Pool(settings, urls, None, lambda port, index: [])
        engine = SGLangEngine(settings, pool, way or TensorWay(60), lambda: weights(1.0), 50)
        try:
            if synced:
                engine.update_weights(weights(1.0), 7)
            yield engine
        finally:
            engine.close()


def expected(asked):
    """What an undisturbed server with these weights answers."""
    model = PseudoModel()
    model.load_tensors(weights(1.0))
    params = {"max_new_tokens": SAMPLING.max_new_tokens, "stop_token_ids": [2]}
    return [model.generate(r.prompt_ids, params | {"sampling_seed": r.seed}) for r in asked]


def check(samples, asked):
    assert [s.sample_id for s in samples] == [r.sample_id for r in asked]
    assert [s.group_id for s in samples] == [r.group_id for r in asked]
    assert [s.prompt_ids for s in samples] == [r.prompt_ids for r in asked]
    assert [(s.response_ids, s.logprobs, s.finish_reason) for s in samples] == expected(asked)
    assert {s.weight_version for s in samples} == {7}


def generated(stub):
    return [body for path, body in stub.calls if path == "/generate"]


# --- the good case ---------------------------------------------------------------------------------------


def test_samples_come_back_in_order_each_asked_once():
    stubs = [Stub(), Stub()]
    with engine_on(*stubs) as engine:
        asked = requests()
        check(engine.generate(asked, SAMPLING), asked)
        assert engine.generate([], SAMPLING) == []
        bodies = [body for stub in stubs for body in generated(stub)]
        assert len(bodies) == len(asked) == len({body["rid"] for body in bodies})
        assert Counter(b["sampling_params"]["sampling_seed"] for b in bodies) == Counter(r.seed for r in asked)
        prompts = [{tuple(body["input_ids"]) for body in generated(stub)} for stub in stubs]
        assert not prompts[0] & prompts[1] and all(prompts)  # a prompt's samples share a server
        found = engine.metrics()
        assert {name for name, value in found.items() if value} <= {"rollout/sglang/servers", "rollout/sglang/queue_s"}
        assert found["rollout/sglang/servers"] == 2


def test_no_server_gets_more_requests_at_a_time_than_allowed():
    stub = Stub()
    stub.delay = 0.01
    with engine_on(stub, max_concurrency=3) as engine:
        asked = requests()
        check(engine.generate(asked, SAMPLING), asked)
        assert stub.most_running == 3


def test_sampling_settings_reach_the_server():
    stub = Stub()
    with engine_on(stub) as engine:
        sampling = SamplingParams(8, 0.7, 0.9, 20, (2, 9), ("###",))
        engine.generate(requests(1, 1), sampling)
        params = generated(stub)[0]["sampling_params"]
        assert (params["temperature"], params["top_p"], params["top_k"]) == (0.7, 0.9, 20)
        assert params["stop_token_ids"] == [2, 9] and params["stop"] == ["###"] and params["max_new_tokens"] == 8


# --- weights ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tp", [1, 2])
def test_weights_arrive_in_buckets_and_the_version_with_the_last(tp):
    stub = Stub(tp=tp)
    with engine_on(stub) as engine:
        paths = [path for path, body in stub.calls if path.startswith("/") and "health" not in path]
        order = ["/abort_request", "/pause_generation", "/flush_cache", "/begin_weight_update"]
        order += ["/update_weights_from_tensor"] * 2 + ["/end_weight_update", "/continue_generation", "/model_info"]
        assert paths[-len(order) :] == order
        sent = [body for path, body in stub.calls if path == "/update_weights_from_tensor"]
        assert [body["flush_cache"] for body in sent] == [False, True]
        assert "weight_version" not in sent[0] and len(sent[0]["serialized_named_tensors"]) == tp
        report = engine.update_weights(weights(2.0), 8)
        assert (report.bytes, report.buckets, report.version) == (100, 2, 8)
        assert engine.generate(requests(1, 1), SAMPLING)[0].weight_version == 8
        assert engine.health().ok


def test_weights_through_a_folder(tmp_path):
    source = tmp_path / "model"
    source.mkdir()
    (source / "config.json").write_text("{}")
    way = DiskWay(tmp_path / "sync", SHAPES, source, torch.float32)
    with engine_on(Stub(), way=way) as engine:
        asked = requests(2)
        check(engine.generate(asked, SAMPLING), asked)
    assert list((tmp_path / "sync").iterdir()) == []


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    way = DiskWay(tmp_path / "file", SHAPES, tmp_path, torch.float32)
    with (
        engine_on(Stub(), way=way, synced=False) as engine,
        pytest.raises(UserError, match="sync_dir"),
    ):
        engine.update_weights(weights(1.0), 7)


def test_refused_weights_are_one_line_with_the_server_s_words():
    stub = Stub()
    stub.fault = lambda path, body, number: "400" if "from_tensor" in path else None
    with engine_on(stub, synced=False) as engine, pytest.raises(UserError, match=r"refused the weights.*told to"):
        engine.update_weights(weights(1.0), 7)


def test_a_server_that_breaks_off_an_update_gets_the_weights_before_it_takes_requests():
    good, bad = Stub(), Stub()
    with engine_on(good, bad, retries=0) as engine:
        bad.fault = lambda path, body, number: "503" if "from_tensor" in path and number < 4 else None
        engine.update_weights(weights(1.0), 7)
        assert engine.metrics()["rollout/sglang/dead_servers"] == 1
        asked = requests()
        check(engine.generate(asked, SAMPLING), asked)
        assert bad.weight_version == good.weight_version and generated(bad)


def test_a_server_with_other_weights_is_never_believed():
    good, bad = Stub(), Stub()
    bad.fault = lambda path, body, number: "version" if path == "/generate" else None
    with engine_on(good, bad) as engine:
        asked = requests()
        check(engine.generate(asked, SAMPLING), asked)


def test_weights_of_another_trainer_end_the_run_when_they_do_not_go_away():
    stub = Stub()
    stub.fault = lambda path, body, number: "version" if path == "/generate" else None
    with engine_on(stub) as engine, pytest.raises(RolloutLost, match="another trainer"):
        engine.generate(requests(1), SAMPLING)


# --- failures --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["503", "half", "drop", "counts", "other", "twice", "abort"])
def test_a_failed_attempt_is_repeated(fault):
    stub = Stub()
    stub.fault = lambda path, body, number: fault if path == "/generate" and number % 3 == 0 else None
    with engine_on(stub, retries=10) as engine:
        asked = requests()
        check(engine.generate(asked, SAMPLING), asked)
        found = engine.metrics()
        assert found["rollout/sglang/retries"] >= 8 and found["rollout/sglang/dead_servers"] == 0
        bad = fault in ("counts", "other", "twice", "abort")
        assert (found["rollout/sglang/bad_answers"] > 0) == bad


def test_a_request_that_fails_on_one_server_goes_to_another():
    good, bad = Stub(), Stub()
    bad.fault = lambda path, body, number: "503" if path == "/generate" else None
    with engine_on(good, bad) as engine:
        asked = requests()
        check(engine.generate(asked, SAMPLING), asked)
        assert engine.metrics()["rollout/sglang/resent"] > 0


def test_a_request_that_fails_everywhere_is_named():
    stubs = [Stub(), Stub()]
    for stub in stubs:
        stub.fault = lambda path, body, number: "counts" if body.get("input_ids") == [5, 4, 5] else None
    with (
        engine_on(*stubs) as engine,
        pytest.raises(RolloutLost, match=r"sample 1(08|09|10|11) .*every.*disagree"),
    ):
        engine.generate(requests(), SAMPLING)


def test_a_refused_request_is_not_repeated():
    stub = Stub()
    stub.fault = lambda path, body, number: "400" if path == "/generate" else None
    with (
        engine_on(stub, max_concurrency=1) as engine,
        pytest.raises(RolloutLost, match=r"refused sample 100"),
    ):
        engine.generate(requests(), SAMPLING)
    assert len(generated(stub)) == 1


@pytest.mark.parametrize("at", [0, 3, 7])
def test_what_a_dying_server_had_is_answered_by_another(at):
    good, bad = Stub(), Stub()
    good.delay = bad.delay = 0.01
    bad.fault = lambda path, body, number: "die" if path == "/generate" and number == at else None
    with engine_on(good, bad, max_concurrency=3) as engine:
        asked = requests(8)
        check(engine.generate(asked, SAMPLING), asked)
        found = engine.metrics()
        assert found["rollout/sglang/dead_servers"] == 1 and found["rollout/sglang/resent"] >= 1
        assert found["rollout/sglang/servers"] == 1


def test_a_hung_server_is_found_by_its_health_check():
    good, bad = Stub(), Stub()

    def hang(path, body, number):
        if path == "/generate":
            bad.healthy = False
            return "hang"
        return None

    bad.fault = hang
    with engine_on(good, bad) as engine:
        asked = requests()
        check(engine.generate(asked, SAMPLING), asked)
        assert engine.metrics()["rollout/sglang/dead_servers"] == 1


def test_a_single_request_that_hangs_is_repeated_after_its_time():
    stub = Stub()
    stub.fault = lambda path, body, number: "hang" if path == "/generate" and number == 0 else None
    with engine_on(stub, timeout_s=0.5) as engine:
        asked = requests()
        check(engine.generate(asked, SAMPLING), asked)
        assert engine.metrics()["rollout/sglang/retries"] == 1


def test_all_servers_dead_is_one_line_in_bounded_time():
    stubs = [Stub(), Stub()]
    for stub in stubs:
        stub.fault = lambda path, body, number: "die" if path == "/generate" and number == 2 else None
    with engine_on(*stubs, down_timeout_s=0.3) as engine:
        with pytest.raises(RolloutLost, match=r"no SGLang server is left \(http.*http") as caught:
            engine.generate(requests(), SAMPLING)
        assert "\n" not in str(caught.value)
        assert not engine.health().ok


def test_a_context_that_is_too_short_is_said():
    stub = Stub()
    stub.fault = lambda path, body, number: "short" if path == "/generate" else None
    with engine_on(stub) as engine, pytest.raises(RolloutLost, match="context length is too short"):
        engine.generate(requests(1, 1), SAMPLING)


# --- one batch ahead -------------------------------------------------------------------------------------


def test_a_batch_is_generated_while_the_caller_does_something_else():
    stub = Stub()
    with engine_on(stub) as engine:
        stub.paused, stub.healthy = True, True  # nothing is answered for now
        asked = requests()
        engine.start(asked, SAMPLING)
        assert not engine._ahead.batch.finished
        stub.paused = False
        check(engine.finish(7), asked)
        with pytest.raises(RuntimeError, match="no batch is under way"):
            engine.finish(7)


def test_other_batches_and_new_weights_wait_for_the_one_ahead():
    with engine_on(Stub()) as engine:
        asked, others = requests(), requests(2, 2, first=900)
        engine.start(asked, SAMPLING)
        check(engine.generate(others, SAMPLING), others)
        engine.update_weights(weights(3.0), 8)
        check(engine.finish(8), asked)  # by the weights of then


def test_a_batch_that_nobody_wants_any_more_ends():
    stub = Stub()
    with engine_on(stub, health_interval_s=30.0) as engine:
        stub.paused = True
        engine.start(requests(), SAMPLING)
        engine.drop()
        stub.paused = False
        asked = requests(2)
        check(engine.generate(asked, SAMPLING), asked)


def test_servers_that_die_with_a_batch_ahead_are_told_when_it_is_asked_for():
    stub = Stub()
    stub.fault = lambda path, body, number: "die" if path == "/generate" else None
    with engine_on(stub, down_timeout_s=0.3) as engine:
        engine.start(requests(), SAMPLING)
        with pytest.raises(RolloutLost, match="no SGLang server is left"):
            engine.finish(7)


# --- connecting ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", ["0.4.9", "0.5.22", "0.6.0", "main"])
def test_an_unknown_version_is_refused_by_name(version):
    with engine_on(Stub(version=version), synced=False) as engine, pytest.raises(UserError, match="runs SGLang"):
        engine.update_weights(weights(1.0), 7)


def test_a_server_that_never_answers_is_named():
    settings = SGLangConfig(**QUICK | {"down_timeout_s": 0.2})
    pool = Pool(settings, ["http://127.0.0.1:9"], None, lambda port, index: [])
    engine = SGLangEngine(settings, pool, TensorWay(60), lambda: weights(1.0), 50)
    try:
        with pytest.raises(RolloutLost, match=r"no SGLang server is healthy.*127\.0\.0\.1:9"):
            engine.update_weights(weights(1.0), 7)
    finally:
        engine.close()


@pytest.mark.parametrize(("prompt", "words"), [([], "empty"), ([50], "token 50"), ([-1], "token -1")])
def test_prompts_that_no_model_could_read_are_not_sent(prompt, words):
    with engine_on(Stub()) as engine, pytest.raises(UserError, match=words):
        engine.generate([GenerateRequest(1, 0, prompt, 0)], SAMPLING)
