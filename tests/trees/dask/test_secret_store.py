"""The store of a fit: listens at one address, serves who knows the secret, and does what torch expects of a store."""

from __future__ import annotations

import socket
import threading
from contextlib import closing
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("distributed")

from bitplan.trees.dask import secret_store
from bitplan.trees.dask.secret_store import SecretStore, StoreHost

SECRET = b"s" * 32
LIMIT = timedelta(seconds=30)


@pytest.fixture
def host():
    with closing(StoreHost("127.0.0.1", SECRET)) as opened:
        yield opened


def connect(host, secret=SECRET, limit=LIMIT):
    return SecretStore(host.host, host.port, secret, limit)


def test_it_listens_at_its_own_address_alone(host):
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", host.port), 5)


def test_strangers_get_nothing(host, monkeypatch):
    connect(host).set("key", b"value")
    with pytest.raises(dist.DistStoreError, match="cannot be reached: digest"):
        connect(host, b"another")
    torchs = {"is_master": False, "timeout": timedelta(seconds=0.3), "wait_for_workers": False}
    with pytest.raises(dist.DistError):
        dist.TCPStore(host.host, host.port, **torchs)
    for said in (b"", b"GET / HTTP/1.0\r\n\r\n", b"\xff" * 100, b"\0" * 100):
        with socket.create_connection((host.host, host.port), 5) as stranger:
            stranger.sendall(said)
            stranger.shutdown(socket.SHUT_WR)
            answer = b""
            while came := stranger.recv(4096):
                answer += came
            assert b"value" not in answer
    monkeypatch.setattr(secret_store, "HANDSHAKE_S", 0.05)
    with socket.create_connection((host.host, host.port), 5) as silent:
        while silent.recv(4096):
            pass  # the challenge, then the end
    assert connect(host).get("key") == b"value"


def test_it_is_a_store_of_torch(host):
    one, other = connect(host), connect(host)
    assert (one.add("count", 2), other.add("count", 3)) == (2, 5)
    assert not other.check(["late", "count"])
    threading.Timer(0.05, one.set, ("late", "\0bytes")).start()
    other.wait(["late"])
    assert other.get("late") == b"\0bytes"
    with pytest.raises(dist.DistStoreError, match=r"nobody has set .*never"):
        other.wait(["late", "never"], timedelta(seconds=0.02))
    host.close()
    with pytest.raises(dist.DistStoreError, match="the store of the fit is gone"):
        one.get("count")


def test_gloo_meets_there(host):
    sums = {}

    def work(rank):
        options = dist.ProcessGroupGloo._Options()
        options._timeout = LIMIT
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=host.host)]
        store = connect(host)
        group = dist.ProcessGroupGloo(dist.PrefixStore("fit", store), rank, 3, options)
        numbers = torch.tensor([rank + 1])
        group.allreduce([numbers]).wait()
        sums[rank] = int(numbers)

    threads = [threading.Thread(target=work, args=[rank]) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sums == {0: 6, 1: 6, 2: 6}
