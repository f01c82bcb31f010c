"""The store in which workers of one fit meet: it listens at one address, and serves who knows the fit's secret.

torch's own TCPStore listens on all interfaces, and whoever reaches it may read, list and change its keys. Here a
connection begins with a challenge in both directions (HMAC, as multiprocessing has it), and the secret, which the
client of the cluster makes for each fit, goes to the workers by Dask's own connections. What is sent are bytes, never
pickles. The host keeps the numbers that a fit needs to meet: addresses, counts, messages of workers that stopped.
"""

from __future__ import annotations

import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from multiprocessing import AuthenticationError
from multiprocessing.connection import answer_challenge, deliver_challenge
from typing import Any

import torch.distributed as dist

MOST_BYTES = 2**24  # of a message
POLL_S = 0.01
HANDSHAKE_S = 10.0
LOOK_S = 0.5  # how soon a store that was closed listens no more
SET, GET, ADD, CHECK = range(4)  # what gloo and a fit ask of a store


def _packed(parts: Sequence[bytes]) -> bytes:
    return b"".join(struct.pack("<I", len(part)) + part for part in parts)


def _unpacked(message: bytes) -> list[bytes]:
    parts, at = [], 0
    while at < len(message):
        (length,) = struct.unpack_from("<I", message, at)
        parts.append(message[at + 4 : at + 4 + length])
        at += 4 + length
    return parts


class _Messages:
    """Messages over a socket, each after its length; multiprocessing's challenges take it for a connection."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._file = connected.makefile("rb")

    def send_bytes(self, message: bytes) -> None:
        self._socket.sendall(struct.pack("<I", len(message)) + message)

    def recv_bytes(self, most: int = MOST_BYTES) -> bytes:
        (length,) = struct.unpack("<I", self._read(4))
        if length > most:
            raise OSError(f"a message of {length} bytes, expected at most {most}")
        return self._read(length)

    def _read(self, count: int) -> bytes:
        came = self._file.read(count)
        if len(came) < count:
            raise EOFError("the connection was closed")
        return came

    def close(self) -> None:
        """Close the connection; a thread that waits for a message on it gets an error."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._file.close()
        self._socket.close()


_deliver: Any = deliver_challenge
_answer: Any = answer_challenge


class StoreHost:
    """A server thread with the keys and values of one fit's store; runs until `close`."""

    def __init__(self, host: str, secret: bytes) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, 0), family=family, backlog=128)
        self.host, self.port, self._secret = host, int(self._socket.getsockname()[1]), secret
        self._values: dict[bytes, bytes] = {}
        self._lock, self._is_closed = threading.Lock(), False
        self._connections: set[_Messages] = set()
        self._socket.settimeout(LOOK_S)
        threading.Thread(target=self._accept, name="bitplan-store", daemon=True).start()

    def close(self) -> None:
        self._is_closed = True
        for connection in list(self._connections):
            connection.close()

    def _accept(self) -> None:
        with self._socket:
            while not self._is_closed:
                with suppress(TimeoutError):
                    came = self._socket.accept()[0]
                    threading.Thread(target=self._serve, args=[came], name="bitplan-store", daemon=True).start()

    def _serve(self, came: socket.socket) -> None:
        came.settimeout(HANDSHAKE_S)  # for who connects and says nothing
        connection = _Messages(came)
        self._connections.add(connection)
        try:
            _deliver(connection, self._secret)
            _answer(connection, self._secret)
            came.settimeout(None)
            while not self._is_closed:
                connection.send_bytes(self._answer(_unpacked(connection.recv_bytes())))
        except (OSError, EOFError, AuthenticationError, AssertionError, struct.error, ValueError, IndexError):
            pass  # it left, or is no worker of this fit
        finally:
            self._connections.discard(connection)
            connection.close()

    def _answer(self, request: list[bytes]) -> bytes:
        operation, keys = request[0][0], request[1:]
        with self._lock:
            if operation == SET:
                self._values[keys[0]] = keys[1]
            elif operation == ADD:
                total = int(self._values.get(keys[0], b"0")) + int(keys[1])
                self._values[keys[0]] = b"%d" % total
                return _packed([self._values[keys[0]]])
            elif operation == CHECK:
                return _packed([b"1" if all(key in self._values for key in keys) else b""])
            return _packed([self._values.get(keys[0], b"")])


class SecretStore(dist.Store):  # type: ignore[misc, name-defined]
    """A worker's side, as torch.distributed takes a store; keep it as long as what uses it."""

    def __init__(self, host: str, port: int, secret: bytes, timeout: timedelta) -> None:
        super().__init__()
        self._timeout, self._lock = timeout, threading.Lock()
        try:
            connected = socket.create_connection((host, port), timeout.total_seconds())
            self._connection = _Messages(connected)
            weakref.finalize(self, self._connection.close)
            _answer(self._connection, secret)
            _deliver(self._connection, secret)
            connected.settimeout(None)
        except (OSError, EOFError, AuthenticationError, AssertionError) as error:
            raise dist.DistStoreError(f"the store of the fit at {host}:{port} cannot be reached: {error}") from None

    def _ask(self, operation: int, *parts: bytes) -> bytes:
        try:
            with self._lock:
                self._connection.send_bytes(_packed([bytes([operation]), *parts]))
                return _unpacked(self._connection.recv_bytes())[0]
        except (OSError, EOFError) as error:
            raise dist.DistStoreError(f"the store of the fit is gone: {error or type(error).__name__}") from None

    def set(self, key: str, value: bytes | str) -> None:
        self._ask(SET, key.encode(), value.encode() if isinstance(value, str) else bytes(value))

    def get(self, key: str) -> bytes:
        self._wait_until(lambda: self.check([key]), self._timeout, [key])
        return self._ask(GET, key.encode())

    def add(self, key: str, amount: int) -> int:
        return int(self._ask(ADD, key.encode(), b"%d" % amount))

    def check(self, keys: list[str]) -> bool:
        return bool(self._ask(CHECK, *(key.encode() for key in keys)))

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self._wait_until(lambda: self.check(keys), timeout or self._timeout, keys)

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout

    def has_extended_api(self) -> bool:
        return False

    def _wait_until(self, is_there: Callable[[], bool], timeout: timedelta, keys: list[str]) -> None:
        until = time.monotonic() + timeout.total_seconds()
        while not is_there():
            if time.monotonic() > until:
                raise dist.DistStoreError(f"nobody has set {keys!r:.200} within {timeout.total_seconds():g} s")
            time.sleep(POLL_S)
