"""A store of HTTP that stalls, cuts, lies and answers with errors, as a test tells it to."""

import hashlib
import re
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote

PASSING = (
    *("429", "500", "502", "503", "504", "stall", "stall midway", "cut", "reset", "short"),
    *("long", "elsewhere", "page", "empty"),
)
"""Faults that may pass."""
LASTING = ("404", "403", "another version")
"""Faults after which the file is not the one that was listed."""
LIES = ("wrong bytes", "whole")
"""Bits that are not those of the file, and the file whole in place of a range."""
STALL_SECONDS = 30.0
"""For how long the server is silent, in a thread that nobody waits for; clients wait for less."""


@dataclass
class Store:
    """What the server of a folder was asked for and sent, and how it fails."""

    folder: Path
    """Folder whose files it serves."""
    fault: Callable[[int, str, str, bool], str | None] | None = None
    """Function of the number of a request, from 0, its method, its file and whether it wants a
    range, that names a fault or None; None for none."""
    url: str = ""
    """Address of the folder."""
    asked: list[tuple[str, str, tuple[int, int] | None]] = field(default_factory=list)
    """Method, file and range [begin, end) of each request."""
    sent_bytes: int = 0
    """Bytes of files that were sent."""
    retry_after: str = "0"
    """Header Retry-After of 429 and 503."""
    etags: bool = True
    """Whether files have ETags."""
    etags_of: tuple[str, ...] = ("HEAD", "GET")
    """Methods whose answers have them."""
    is_weak: bool = False
    """Whether they are weak ones."""
    delay_seconds: float = 0.0
    """Time before each answer."""
    bytes_per_second: float = 0.0
    """Rate of each answer; 0 for any."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    kept: dict[tuple[Path, int, int], tuple[bytes, str]] = field(default_factory=dict)

    def content(self, path):
        """The content of a file."""
        return self._read(path)[0]

    def etag(self, path):
        """Its version."""
        return self._read(path)[1]

    def _read(self, path):
        about = path.stat()
        key = path, about.st_mtime_ns, about.st_ino
        if key not in self.kept:
            content = path.read_bytes()
            self.kept[key] = content, f'"{hashlib.md5(content).hexdigest()}"'
        return self.kept[key]


@contextmanager
def served(folder, fault=None, **options):
    """The store of `folder`, while the context lasts."""
    store = Store(folder=Path(folder), fault=fault, **options)
    handler = type("Handler", (_Handler,), {"store": store})
    with _Server(("127.0.0.1", 0), handler) as server:
        store.url = f"http://127.0.0.1:{server.server_port}"
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        try:
            yield store
        finally:
            server.shutdown()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def handle_error(self, request, client_address):
        """Nothing: clients leave servers that stall."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    store: Store

    def log_message(self, format, *args):
        """Nothing."""

    def do_HEAD(self):
        """Size and version."""
        self._answer()

    def do_GET(self):
        """A file, or a range of it."""
        self._answer()

    def _answer(self):
        store, name = self.store, unquote(self.path).lstrip("/")
        wanted = re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("Range", ""))
        path = store.folder / name
        content = store.content(path) if path.is_file() else None
        span = None
        if wanted and content is not None:
            end = int(wanted[2]) + 1 if wanted[2] else len(content)
            span = int(wanted[1] or 0), min(end, len(content))
            if not wanted[1]:  # the last bytes
                span = max(0, len(content) - int(wanted[2] or 0)), len(content)
        with store.lock:
            number = len(store.asked)
            store.asked.append((self.command, name, span))
        time.sleep(store.delay_seconds)
        fault = store.fault(number, self.command, name, span is not None) if store.fault else None
        if path.is_dir():
            return self._send(200, _links(path), {"Content-Type": "text/html"})
        if content is None:
            return self._send(404, b"", {})
        self._send_file(content, path, span, fault)

    def _send_file(self, content, path, span, fault):
        etag = self.store.etag(path) if self.store.etags else None
        if etag is not None and self.store.is_weak:
            etag = f"W/{etag}"
        if fault == "another version":
            etag = '"another"'
        headers = {"Accept-Ranges": "bytes", "Content-Type": "application/octet-stream"}
        if etag is not None:
            headers["ETag"] = etag
        if self.command not in self.store.etags_of:
            del headers["ETag"]
        headers["Last-Modified"] = formatdate(path.stat().st_mtime, usegmt=True)
        match = self.headers.get("If-Match")
        if fault is not None and fault.isdecimal():
            return self._send(int(fault), b"no", {"Retry-After": self.store.retry_after})
        if match not in (None, etag) and fault != "another version":
            return self._send(412, b"", headers)
        if span is not None and span[0] >= len(content):
            return self._send(416, b"", headers)
        if fault == "whole":
            span = None
        body, status = content, 200
        if span is not None:
            begin, end = span
            if fault == "elsewhere":
                begin, end = max(0, begin - 7), max(0, begin - 7) + end - begin
            body, status = content[begin:end], 206
            headers["Content-Range"] = f"bytes {begin}-{end - 1}/{len(content)}"
        if fault == "page":
            body, status, headers = (
                b"<html>Please log in</html>",
                200,
                {"Content-Type": "text/html"},
            )
        elif fault == "wrong bytes":
            body = bytes(byte ^ 0x5A for byte in body)
        elif fault in ("short", "empty"):
            body = body[: len(body) // 2] if fault == "short" else b""
        elif fault == "long":
            body += b"and more"
        self._send(status, body, headers, fault)

    def _send(self, status, body, headers, fault=None):
        if fault == "reset":
            linger = struct.pack("ii", 1, 0)  # close by a reset
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            self.close_connection = True
            return self.connection.close()
        if fault == "stall":
            time.sleep(STALL_SECONDS)
            self.close_connection = True
            return None
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "HEAD":
            return None
        if fault in ("cut", "stall midway"):
            self.wfile.write(body[: len(body) // 2])
            if fault == "stall midway":
                time.sleep(STALL_SECONDS)
            self.close_connection = True
            return None
        if self.store.bytes_per_second:
            began = time.monotonic()
            for at in range(0, len(body), 2**18):
                self.wfile.write(body[at : at + 2**18])
                early = began + (at + 2**18) / self.store.bytes_per_second - time.monotonic()
                time.sleep(max(0.0, early))
        else:
            self.wfile.write(body)
        with self.store.lock:
            self.store.sent_bytes += len(body)
        return None


def _links(folder):
    names = sorted(f"{each.name}/" if each.is_dir() else each.name for each in folder.iterdir())
    return "".join(f'<a href="{name}">{name}</a>' for name in names).encode()
