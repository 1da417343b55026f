"""The router's invariants, over random submissions, answers, failures, servers that come and go."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given, settings

from megappo.rollout.sglang.router import Item, Router

NAMES = ["a", "b", "c"]
STEPS = st.lists(
    st.tuples(st.sampled_from(["next", "done", "fail", "leave", "join", "submit"]), st.integers(0, 10**6)),
    min_size=1,
    max_size=120,
)


@settings(max_examples=150, deadline=None)
@given(STEPS, st.integers(1, 4), st.integers(1, 5))
def test_every_request_is_with_one_server_and_none_is_lost(steps, limit, group_size):
    router = Router(limit)
    running: dict[int, str] = {}  # key -> server
    outside: list[Item] = []  # failed, not submitted again yet
    homes: dict[int, set[str]] = {}  # group -> servers it was sent to while that one stayed
    items: dict[int, Item] = {}
    finished: set[int] = set()
    router.join("a")
    for action, number in steps:
        if action == "submit":
            key = len(items)
            item = items[key] = Item(key, key // group_size, 1 + number % 50)
            router.submit([item])
        elif action == "next":
            picked = router.next()
            if picked is None:
                check_idle(router, items, running, outside, finished, limit)
                continue
            server, item = picked
            assert item.key not in running and item.key not in finished
            assert server in router.servers and server not in item.avoid
            running[item.key] = server
            if not item.avoid:
                homes.setdefault(item.group, set()).add(server)
                assert len(homes[item.group]) == 1
        elif action in ("done", "fail") and running:
            key = sorted(running)[number % len(running)]
            server = running.pop(key)
            router.done(server, key)
            if action == "done":
                finished.add(key)
            else:
                old = items[key]
                items[key] = Item(key, old.group, old.cost, old.avoid | {server} if number % 3 == 0 else old.avoid)
                outside.append(items[key])
        elif action == "leave" and router.servers:
            server = sorted(router.servers)[number % len(router.servers)]
            lost = router.leave(server)
            assert {item.key for item in lost} == {key for key, where in running.items() if where == server}
            running = {key: where for key, where in running.items() if where != server}
            homes = {group: names - {server} for group, names in homes.items()}
            router.submit(lost)
        elif action == "join":
            router.join(NAMES[number % 3])
        assert all(list(running.values()).count(name) <= limit for name in NAMES)
    router.submit(outside)
    drain(router, running, finished)
    stuck = {key for key in items if key not in finished}
    assert all(set(router.servers) <= items[key].avoid for key in stuck)
    assert bool(stuck) == (router.stuck() is not None) or not router.servers


def check_idle(router, items, running, outside, finished, limit):
    """Nothing was handed out: each request is busy, or has no free server that it may use."""
    free = {name for name in router.servers if router.running(name) < limit}
    busy = {*running, *finished, *(item.key for item in outside)}
    for key, item in items.items():
        if key not in busy:
            home = router._home.get(item.group)
            possible = {home} if home is not None and home not in item.avoid else set(router.servers)
            assert not (possible & free) - item.avoid


def drain(router, running, finished):
    while running or router.servers:
        picked = router.next()
        if picked is not None:
            running[picked[1].key] = picked[0]
        elif running:
            key, server = running.popitem()
            router.done(server, key)
            finished.add(key)
        else:
            return


def test_groups_go_to_the_server_with_the_least_outstanding_tokens():
    router = Router(10)
    for name in NAMES:
        router.join(name)
    router.submit([Item(k, k, cost) for k, cost in enumerate([100, 10, 20, 5, 5, 5, 30])])
    placed = [router.next() for _ in range(7)]
    assert [server for server, _ in placed] == ["a", "b", "c", "b", "b", "b", "c"]


def test_a_slow_server_gets_fewer_groups():
    router = Router(1)
    router.join("slow")
    router.join("fast")
    router.submit([Item(k, k, 10) for k in range(10)])
    server, _ = router.next()
    assert server == "slow"
    for _ in range(9):
        server, item = router.next()
        assert server == "fast"
        router.done("fast", item.key)
    assert router.next() is None


def test_a_request_that_avoids_every_server_is_told():
    router = Router(1)
    router.join("a")
    router.submit([Item(0, 0, 1, frozenset("a"))])
    assert router.next() is None and router.stuck().key == 0
    router.join("b")
    assert router.stuck() is None and router.next()[0] == "b"
