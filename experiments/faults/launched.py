"""One `scalejax launch` of two processes, seen from outside: what it says and when, its processes,
their heartbeats and ports, and whether anything of it is left.

Linux only: it reads /proc.
"""

import os
import re
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Mapping
from pathlib import Path

from scalejax.core.heartbeat import Beat, read_beat

MARK = "SCALEJAX_FAULTS"
"""Variable that everything a launch starts inherits; its value is the launch's own."""
_CODE = "import sys; from scalejax.cli.main import main; sys.exit(main())"
_LISTENING = "0A"  # state TCP_LISTEN, /proc/net/tcp


class Launched:
    """A launch under way."""

    def __init__(self, arguments: list[str], environment: Mapping[str, str], folder: Path) -> None:
        """Start it.

        Args:
            arguments: of `scalejax launch`.
            environment: variables for it.
            folder: of the run.
        """
        self.mark = uuid.uuid4().hex
        self.folder = folder
        self.lines: list[tuple[float, str]] = []
        """What it said, with the moment."""
        self.begin = time.monotonic()
        self._ports: set[int] = set()
        self.process = subprocess.Popen(
            [sys.executable, "-c", _CODE, "launch", *arguments],
            env={**environment, MARK: self.mark},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def _listen(self) -> None:
        if self.process.stdout is not None:
            for line in self.process.stdout:
                self.lines.append((time.monotonic(), line.rstrip()))

    @property
    def said(self) -> str:
        """All that it said."""
        return "\n".join(line for _, line in self.lines)

    def workers(self) -> list[int]:
        """Ids of its processes that run, the first of the run first."""
        children = f"/proc/{self.process.pid}/task/{self.process.pid}/children"
        found = {}
        for child in _read(children).split():
            variables = environment_of(int(child))
            if variables.get("SCALEJAX_LAUNCHER") == str(self.process.pid):
                found[int(variables["SCALEJAX_PROCESS"])] = int(child)
                self._ports.add(int(variables["SCALEJAX_COORDINATOR"].rpartition(":")[2]))
        return [found[number] for number in sorted(found)]

    def beat(self, number: int) -> Beat | None:
        """What process `number` has said last."""
        return read_beat(self.folder / "processes" / f"heartbeat-{number}")

    def waits_for(self, pattern: str, since: float, seconds: float) -> float | None:
        """Seconds from `since` until it says what `pattern` matches; None if it does not."""
        end = since + seconds
        while True:
            has_ended = self.process.poll() is not None
            if has_ended:
                self._listener.join(5)
            for moment, line in list(self.lines):
                if moment >= since and re.search(pattern, line):
                    return moment - since
            if has_ended or time.monotonic() > end:
                return None
            time.sleep(0.02)

    def ends(self, since: float, seconds: float) -> float | None:
        """Seconds from `since` until it ends; None if it does not."""
        try:
            self.process.wait(max(0.0, since + seconds - time.monotonic()))
        except subprocess.TimeoutExpired:
            return None
        self._listener.join(5)
        return time.monotonic() - since

    def left_behind(self, seconds: float) -> list[str]:
        """Processes and ports of it that are there `seconds` after its end."""
        end = time.monotonic() + seconds
        while True:
            left = [f"process {each}" for each in marked(self.mark)]
            left += [f"port {port}" for port in self._ports & _listening_ports()]
            if not left or time.monotonic() > end:
                return left
            time.sleep(0.05)

    def kill(self) -> None:
        """End it, and all it started, whatever became of it."""
        self.process.kill()
        self.process.wait()
        for each in marked(self.mark):
            os.kill(each, signal.SIGKILL)


def marked(mark: str) -> list[int]:
    """Processes that carry `mark`; a zombie does not."""
    found = []
    for path in Path("/proc").iterdir():
        if path.name.isdecimal() and environment_of(int(path.name)).get(MARK) == mark:
            found.append(int(path.name))
    return found


def environment_of(process: int) -> dict[str, str]:
    """The environment variables of a process; none if it has ended."""
    pairs = _read(f"/proc/{process}/environ").split("\0")
    return dict(pair.split("=", 1) for pair in pairs if "=" in pair)


def _listening_ports() -> set[int]:
    ports = set()
    for line in [*_read("/proc/net/tcp").splitlines(), *_read("/proc/net/tcp6").splitlines()]:
        fields = line.split()
        if len(fields) > 3 and fields[3] == _LISTENING:
            ports.add(int(fields[1].rpartition(":")[2], 16))
    return ports


def _read(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:  # it has ended meanwhile
        return ""
