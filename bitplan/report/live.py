"""A report of a run that goes on: a server for this machine alone, whose page follows the records as they grow.

The page is built anew when a file of the run has changed, and a page that is open loads itself again then. The server
listens on 127.0.0.1, answers only requests that were sent to that address by name, and reads nothing but the records.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from bitplan.base.errors import BitplanError
from bitplan.report.markup import tag
from bitplan.report.page import build_page, build_sections
from bitplan.report.read_records import read_records
from bitplan.report.section import Section

ADDRESS = "127.0.0.1"


class LiveReport(ThreadingHTTPServer):
    """Serves the page of the records that `find_records` lists, which may be none yet.

    `serve_forever()` runs until it is interrupted or another thread calls `shutdown()`; `address` is where a browser
    finds it.
    """

    daemon_threads = True

    def __init__(self, find_records: Callable[[], Sequence[Path]], *, title: str, port: int = 0) -> None:
        try:
            super().__init__((ADDRESS, port), _Request)
        except OSError as error:
            raise BitplanError(f"port {port} of {ADDRESS}: {error.strerror}; give another port, or 0 for any") from None
        self.find_records = find_records
        self.title = title
        self.hosts = {f"{name}:{self.server_port}" for name in (ADDRESS, "localhost")}

    @property
    def address(self) -> str:
        return f"http://{ADDRESS}:{self.server_port}/"

    def state(self) -> tuple[list[Path], str]:
        """The records that there are, and a text that changes when one of them does."""
        try:
            paths = [path for path in self.find_records() if path.exists()]
        except BitplanError:  # a folder that holds no record yet
            paths = []
        stats = [(path.name, status.st_size, status.st_mtime_ns) for path in paths for status in [path.stat()]]
        return paths, hashlib.sha256(repr(stats).encode()).hexdigest()

    def page(self) -> str:
        paths, stamp = self.state()
        try:
            sections = build_sections(read_records(paths)) if paths else [_message("No record has been written yet.")]
        except BitplanError as error:  # a record that cannot be shown as it is now
            sections = [_message(str(error))]
        return build_page(sections, title=self.title, stamp=stamp)


def _message(text: str) -> Section:
    return Section(title="Waiting", anchor="waiting", body=tag("p", text))


class _Request(BaseHTTPRequestHandler):
    server: LiveReport

    def do_GET(self) -> None:
        if self.headers.get("Host", "") not in self.server.hosts:  # another site's name that leads here
            self.send_error(403)
        elif self.path == "/":
            self._answer(self.server.page(), "text/html; charset=utf-8")
        elif self.path == "/stamp":
            self._answer(self.server.state()[1], "text/plain")
        else:
            self.send_error(404)

    def _answer(self, text: str, kind: str) -> None:
        body = text.encode()
        self.send_response(200)
        for name, value in (("Content-Type", kind), ("Content-Length", str(len(body))), ("Cache-Control", "no-store")):
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Do nothing: the server does not print its requests."""
