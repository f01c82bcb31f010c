"""Chromium without a window, driven over its DevTools protocol: enough to look at one page, and no browser download.

websocket-client is all it needs; the browser is the system's (`apt-get install chromium`), or the program that
BITPLAN_CHROMIUM names. What the page asks of the network, and what it writes to the console, is kept.
"""

from __future__ import annotations

import base64
import itertools
import json
import os
import shutil
import subprocess
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any, Self

import pytest

PROGRAMS = ("chromium", "chromium-browser", "google-chrome", "chrome")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-default-apps",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--force-color-profile=srgb",
    "--remote-debugging-port=0",
    "--remote-allow-origins=*",
)
START_S, ANSWER_S = 180, 180  # a machine may be busy
QUIET_S = 0.3  # after the page has loaded: long enough for a request that it should not make


def program() -> str:
    """The browser. Where there is none, a test is skipped; with BITPLAN_NEEDS_BROWSER (`make test`) it fails."""
    named = os.environ.get("BITPLAN_CHROMIUM")
    result = named or next(filter(None, map(shutil.which, PROGRAMS)), None)
    try:
        import websocket  # noqa: F401
    except ModuleNotFoundError:
        result = None
    if result is None:
        message = (
            "needs chromium (apt-get install chromium, or BITPLAN_CHROMIUM=program) and pip install websocket-client"
        )
        if os.environ.get("BITPLAN_NEEDS_BROWSER"):
            pytest.fail(message)
        pytest.skip(message)
    return result


class Browser:
    """One process with a profile of its own; `open` gives a page."""

    def __init__(self) -> None:
        browser = program()
        self._folder = tempfile.TemporaryDirectory(prefix="bitplan-browser-", ignore_cleanup_errors=True)
        profile = Path(self._folder.name)
        command = [browser, *FLAGS, f"--user-data-dir={profile}", "about:blank"]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self._port = self._wait_for_port(profile / "DevToolsActivePort")

    def _wait_for_port(self, path: Path) -> int:
        until = time.monotonic() + START_S
        while time.monotonic() < until:
            if path.exists() and (text := path.read_text()).strip():
                return int(text.split()[0])
            if self._process.poll() is not None:
                raise RuntimeError(f"the browser ended with {self._process.returncode} before it was ready")
            time.sleep(0.05)
        self.close()
        raise TimeoutError(f"the browser was not ready after {START_S} s")

    def open(self, path: Path | str, **view: Any) -> Page:
        with urllib.request.urlopen(f"http://127.0.0.1:{self._port}/json/list", timeout=ANSWER_S) as answer:
            targets = json.load(answer)
        target = next(each for each in targets if each["type"] == "page")
        return Page(target["webSocketDebuggerUrl"], path, **view)

    def close(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(10)
        self._folder.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Page:
    """A file that was opened: `requests` are the addresses it asked for, `problems` what it complained of."""

    def __init__(
        self, address: str, path: Path | str, *, width: int = 1280, height: int = 900, dark: bool = False
    ) -> None:
        import websocket

        self._socket = websocket.create_connection(address, timeout=ANSWER_S)
        self._numbers = itertools.count(1)
        self.requests: list[str] = []
        self.problems: list[str] = []
        self._loaded = False
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")
        phone = width < 600
        size = {"width": width, "height": height, "deviceScaleFactor": 2 if phone else 1, "mobile": phone}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", media="", features=[scheme])
        self.requests.clear()
        self.problems.clear()
        self._loaded = False
        self.address = path if isinstance(path, str) else path.resolve().as_uri()
        self.call("Page.navigate", url=self.address)
        self._listen(until_loaded=True)
        self._listen(seconds=QUIET_S)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        number = next(self._numbers)
        self._socket.send(json.dumps({"id": number, "method": method, "params": parameters}))
        while True:
            message = json.loads(self._socket.recv())
            if message.get("id") == number:
                if "error" in message:
                    raise RuntimeError(f"{method}: {message['error']}")
                return dict(message["result"])
            self._note(message)

    def run(self, script: str) -> Any:
        """The value of an expression in the page."""
        result = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in result:
            raise RuntimeError(f"{script}: {result['exceptionDetails']}")
        return result["result"].get("value")

    def press(self, key: str, text: str = "") -> None:
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, text=text if kind == "keyDown" else "")

    def point_at(self, x: float, y: float) -> None:
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def picture(self, path: Path | None = None, *, whole: bool = False) -> bytes:
        options: dict[str, Any] = {"format": "png"}
        if whole:
            size = self.call("Page.getLayoutMetrics")["cssContentSize"]
            options |= {
                "captureBeyondViewport": True,
                "clip": {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1},
            }
        data = base64.b64decode(self.call("Page.captureScreenshot", **options)["data"])
        if path is not None:
            path.write_bytes(data)
        return data

    def close(self) -> None:
        self._socket.close()

    def _listen(self, *, seconds: float = ANSWER_S, until_loaded: bool = False) -> None:
        import websocket

        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            if until_loaded and self._loaded:
                break
            self._socket.settimeout(left)
            try:
                self._note(json.loads(self._socket.recv()))
            except websocket.WebSocketTimeoutException:
                break
        self._socket.settimeout(ANSWER_S)
        if until_loaded and not self._loaded:
            raise TimeoutError(f"{self.address} did not load in {seconds} s")

    def _note(self, message: dict[str, Any]) -> None:
        method, about = message.get("method"), message.get("params", {})
        if method == "Network.requestWillBeSent":
            self.requests.append(about["request"]["url"])
        elif method == "Page.loadEventFired":
            self._loaded = True
        elif method == "Runtime.exceptionThrown":
            self.problems.append(json.dumps(about["exceptionDetails"])[:500])
        elif method == "Runtime.consoleAPICalled" and about["type"] in ("error", "warning", "assert"):
            self.problems.append(json.dumps(about["args"])[:500])
        elif method == "Log.entryAdded" and about["entry"]["level"] in ("error", "warning"):
            self.problems.append(about["entry"]["text"])
