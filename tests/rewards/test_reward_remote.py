"""The HTTP reward against servers that are healthy, slow, failing, refusing, dead or talking nonsense."""

import json
import random
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest

from megappo.errors import UserError
from megappo.rewards.base import Outcome, RewardSample
from megappo.rewards.breaker import CircuitBreaker, backoff
from megappo.rewards.remote import RemoteReward, RemoteSettings


class Server:
    """Answers with `answer(samples, number)`: (status, body); records what was asked."""

    def __init__(self, answer=None):
        self.answer = answer or (lambda samples, number: scores([float(s["response"]) for s in samples]))
        self.posts, self.headers, self.gets = [], [], 0
        self.release = threading.Event()  # set at the end: a slow answer waits for it
        self.lock = threading.Lock()

    def handle(self, handler):
        body = json.loads(handler.rfile.read(int(handler.headers["content-length"])))
        with self.lock:
            number = len(self.posts)
            self.posts.append(body)
            self.headers.append(dict(handler.headers))
        reply = self.answer(body["samples"], number)
        if reply is None:
            self.release.wait(60)
            reply = (200, "{}")
        if reply == "hang up":
            handler.close_connection = True
            return
        send(handler, *reply)


def scores(values, status=200):
    return status, json.dumps({"scores": values})


def send(handler, status, text):
    data = text.encode()
    handler.send_response(status)
    handler.send_header("content-length", str(len(data)))
    handler.end_headers()
    handler.wfile.write(data)


@contextmanager
def serving(server):
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self):
            server.handle(self)

        def do_GET(self):
            server.gets += 1
            send(self, 405, "")

        def log_message(self, *_):
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    http.daemon_threads = True
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{http.server_address[1]}/score"
    finally:
        server.release.set()
        http.shutdown()
        http.server_close()
        thread.join(10)


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


@contextmanager
def remote(url, **settings):
    settings = {"timeout_s": 30.0, "backoff_s": 0.001, "retries": 2} | settings
    reward = RemoteReward("judge", RemoteSettings(url, **settings), random.Random(0))
    try:
        yield reward
    finally:
        reward.close()


@contextmanager
def scored_by(answer=None, **settings):
    server = Server(answer)
    with serving(server) as url, remote(url, **settings) as reward:
        yield reward, server


def samples(*responses, **changes):
    return [RewardSample(i, "chat", "q?", str(response), "t", **changes) for i, response in enumerate(responses)]


def dead_url():
    with serving(Server()) as url:
        return url  # nobody listens there any more


# --- a healthy server


def test_scores_come_back_in_order_in_batches_with_their_extras():
    def answer(batch, _):
        return scores([{"score": float(s["response"]), "len": 3, "why": "x"} for s in batch])

    with scored_by(answer, batch_size=2, concurrency=2) as (reward, server):
        found = reward.outcomes(samples(5, 4, 3, 2, 1))
        assert found == [Outcome(float(x), {"len": 3.0}) for x in (5, 4, 3, 2, 1)]
        assert sorted(len(post["samples"]) for post in server.posts) == [1, 2, 2]
        assert reward.score(samples(7)) == [7.0] and reward.score([]) == []
        assert reward.counters() == {"retries": 0.0, "breaker_opened": 0.0}


def test_a_request_says_everything_about_a_sample():
    info = {"index": np.int64(3), "vector": np.array([1.5]), "tags": {"b", "a"}, "pair": (1, None)}
    with scored_by(kwargs={"model": "m"}) as (reward, server):
        reward.score(samples(1, extra_info=info))
        (post,) = server.posts
    assert post["kwargs"] == {"model": "m"}
    assert post["samples"] == [
        {
            "sample_id": 0,
            "data_source": "chat",
            "prompt": "q?",
            "response": "1",
            "ground_truth": "t",
            "extra_info": {"index": 3, "vector": [1.5], "tags": ["a", "b"], "pair": [1, None]},
        }
    ]


def test_the_token_comes_from_the_environment(monkeypatch):
    monkeypatch.setenv("JUDGE_TOKEN", "secret")
    with scored_by(token_env="JUDGE_TOKEN") as (reward, server):
        reward.score(samples(1))
        headers = {name.lower(): value for name, value in server.headers[0].items()}
    assert headers["authorization"] == "Bearer secret"
    monkeypatch.delenv("JUDGE_TOKEN")
    with pytest.raises(UserError, match="no JUDGE_TOKEN"):
        RemoteReward("judge", RemoteSettings("http://a", token_env="JUDGE_TOKEN"))


def test_requests_run_at_the_same_time_up_to_the_limit():
    together = threading.Barrier(2, timeout=60)

    def answer(batch, _):
        together.wait()  # passes only when two requests are there
        return scores([1.0] * len(batch))

    with scored_by(answer, batch_size=1, concurrency=2) as (reward, _):
        assert reward.score(samples(1, 2, 3, 4)) == [1.0] * 4


def test_start_accepts_any_answer():
    with scored_by() as (reward, server):
        reward.start()
        assert server.gets == 1 and server.posts == []


# --- trouble that passes


@pytest.mark.parametrize("trouble", [(500, "boom"), (503, ""), "hang up"])
def test_server_errors_and_broken_connections_are_tried_again(trouble):
    def answer(batch, number):
        return trouble if number < 2 else scores([1.0] * len(batch))

    with scored_by(answer) as (reward, server):
        assert reward.score(samples(1, 2)) == [1.0, 1.0]
        assert len(server.posts) == 3
        assert reward.counters()["retries"] == 2.0 and reward.counters()["retries"] == 0.0


def test_a_slow_answer_is_given_up_and_asked_for_again():
    with scored_by(lambda _, number: None if number == 0 else scores([1.0]), timeout_s=2.0, retries=5) as (
        reward,
        server,
    ):
        assert reward.score(samples(1)) == [1.0]
        assert len(server.posts) == 2


# --- trouble that stays


def test_a_dead_server_ends_the_run_with_one_line():
    with remote(dead_url()) as reward:
        with pytest.raises(UserError, match=r"reward 'judge': sample 0 .*127\.0\.0\.1.*\(3 attempts\)$"):
            reward.score(samples(1, 2))
        with pytest.raises(UserError, match=r"reward 'judge': .*start the server or fix"):
            reward.start()


def test_a_slow_server_is_reported_as_a_timeout():
    with scored_by(lambda *_: None, timeout_s=0.2, retries=1) as (reward, _):
        found = reward.outcomes(samples(1, 2))
    assert [outcome.timed_out for outcome in found] == [True, True]
    assert "no answer after 0.2 s (2 attempts)" in found[1].error and "sample 1 " in found[1].error


@pytest.mark.parametrize("status", [400, 401, 404, 429, 302])
def test_a_refusal_is_never_tried_again(status):
    with scored_by(lambda *_: (status, "no such model")) as (reward, server):
        (outcome,) = reward.outcomes(samples(1))
        assert f"HTTP {status} no such model" in outcome.error and not outcome.timed_out
        assert len(server.posts) == 1 and not reward.breaker.is_open


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("<html>hello</html>", "the answer is not {\"scores\": [...]} but '<html>hello</html>'"),
        ("[1.0, 2.0]", "the answer is not"),
        ('{"score": 1}', "the answer is not"),
        ('{"scores": 1.0}', "'scores' of the answer is no list but float"),
        ('{"scores": [1.0]}', "the answer has 1 scores for 2 samples"),
    ],
)
def test_a_malformed_answer_is_an_error_of_its_samples_and_not_repeated(body, words):
    with scored_by(lambda *_: (200, body)) as (reward, server):
        found = reward.outcomes(samples(1, 2))
        assert all(words in outcome.error for outcome in found) and len(server.posts) == 1
        with pytest.raises(UserError, match="reward 'judge': sample 0"):
            reward.score(samples(1, 2))


@pytest.mark.parametrize("value", ["NaN", "Infinity", "null", '"1.0"', "[1]", '{"len": 1}', "1" + "0" * 400])
def test_a_bad_score_costs_only_its_sample(value):
    with scored_by(lambda *_: (200, f'{{"scores": [1.0, {value}, 3.0]}}')) as (reward, _):
        good, bad, also_good = reward.outcomes(samples(1, 2, 3))
    assert (good.score, also_good.score) == (1.0, 3.0) and good.error is None
    assert bad.error.startswith("reward 'judge': sample 1 ")


def test_a_sample_that_is_no_json_costs_only_itself():
    with scored_by() as (reward, server):
        batch = [*samples(1), RewardSample(9, "chat", "", "2", extra_info={"raw": b"\0"}), *samples(3)]
        first, bad, last = reward.outcomes(batch)
        assert (first.score, last.score) == (1.0, 3.0) and "bytes is not a JSON value" in bad.error
        assert len(server.posts[0]["samples"]) == 2
        (nan,) = reward.outcomes(samples(1, extra_info={"x": float("nan")}))
        assert "cannot be sent as JSON" in nan.error


def test_a_fatal_sample_ends_the_other_requests_at_once():
    def answer(batch, _):
        return (400, "bad") if batch[0]["response"] == "0" else None  # the others would hang

    with scored_by(answer, batch_size=1, concurrency=3) as (reward, _), pytest.raises(UserError, match="HTTP 400 bad"):
        reward.score(samples(1, 2, 0))


def test_kwargs_that_are_no_json_are_refused():
    with pytest.raises(UserError, match="kwargs cannot be sent as JSON"):
        RemoteReward("judge", RemoteSettings("http://a", kwargs={"x": {1, 2}}))


@pytest.mark.parametrize("url", ["", "ftp://a/b", "http://", "a.b/c", "http://a:port/", "http://[::1"])
def test_a_url_that_is_none_is_refused(url):
    with pytest.raises(UserError, match="is not http://host:port/path"):
        RemoteReward("judge", RemoteSettings(url))


# --- the breaker


def test_after_repeated_failures_the_server_is_left_alone_then_probed():
    state = {"up": False}

    def answer(batch, _):
        return scores([1.0] * len(batch)) if state["up"] else (500, "")

    with scored_by(answer, batch_size=1, concurrency=1, retries=1, breaker_failures=2) as (reward, server):
        now = [0.0]
        reward.breaker = CircuitBreaker(2, 30.0, lambda: now[0])
        found = reward.outcomes(samples(1, 2, 3, 4))
        assert len(server.posts) == 4  # two requests of two attempts; the others were not sent
        assert "HTTP 500 (2 attempts)" in found[1].error
        assert "left alone after repeated failures, next try in 30 s" in found[3].error
        assert reward.counters() == {"retries": 2.0, "breaker_opened": 1.0}
        now[0] = 31.0
        assert all(outcome.error for outcome in reward.outcomes(samples(1, 2, 3)))
        assert len(server.posts) == 5  # one probe of one attempt
        now[0], state["up"] = 62.0, True
        assert [o.error for o in reward.outcomes(samples(1, 2, 3))] == [None] * 3
        assert len(server.posts) == 8


def test_the_breaker_opens_after_failures_in_a_row_only():
    now = [0.0]
    breaker = CircuitBreaker(3, 10.0, lambda: now[0])
    for _ in range(2):
        breaker.failed()
        breaker.failed()
        breaker.succeeded()
    assert breaker.ask() == "go" and not breaker.is_open
    for _ in range(3):
        breaker.failed()
    assert breaker.is_open and breaker.ask() == "no" and breaker.seconds_to_probe() == 10.0
    breaker.failed()  # a late answer to a request from before
    now[0] = 10.0
    assert [breaker.ask(), breaker.ask()] == ["probe", "no"]
    breaker.failed()
    now[0] = 19.0
    assert breaker.ask() == "no"
    now[0] = 20.0
    assert breaker.ask() == "probe"
    breaker.succeeded()
    assert breaker.ask() == "go" and breaker.opened == 1
    breaker.failed()
    assert breaker.ask() == "go"  # the count starts anew


def test_waits_double_with_jitter_up_to_a_limit():
    rng = random.Random(0)
    for attempt, limit in [(0, 0.5), (1, 1.0), (3, 4.0), (10, 30.0), (5000, 30.0)]:
        waits = [backoff(attempt, 0.5, 30.0, rng) for _ in range(50)]
        assert limit / 2 <= min(waits) < max(waits) <= limit
