"""Where ranks meet."""

from __future__ import annotations

import os
import socket
import sys

import pytest
import torch.distributed as dist
from warm_ranks import on_ranks

from megappo.errors import UserError
from megappo.parallel import backend


def test_a_port_that_is_taken_is_a_users_mistake(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        here = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        for name, value in here.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(UserError, match=f"cannot meet at 127.0.0.1:{port} .*MASTER_PORT") as err:
            backend.init_distributed(5)
    assert "\n" not in str(err.value) and not dist.is_initialized()


def preloaded() -> bool:
    return "rank_preload" in sys.modules


@pytest.mark.skipif(os.path.exists("/dev/nvidiactl"), reason="ranks are spawned where there is a GPU")
def test_ranks_are_forked_with_their_imports_done():
    assert on_ranks(1, preloaded)
