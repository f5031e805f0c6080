"""A page in headless Chromium, by the DevTools protocol over two pipes: no port, no library.

Used by tests of pages, and by hand to look at one:
`python tests/support/browser.py PAGE.html OUT.png WIDTH HEIGHT [dark]`.
"""

import base64
import contextlib
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
"""The browser; None where there is none."""
_SECONDS = 60.0


class Tab:
    """One page."""

    def __init__(self, send: int, receive: int) -> None:
        self._send, self._receive = send, receive
        self._numbers, self._rest = itertools.count(1), b""
        self.session: str | None = None
        self.complaints: list[str] = []
        """Errors and warnings of the console, and exceptions."""

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """The result of a command of the protocol."""
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": params}
        if self.session is not None:
            message["sessionId"] = self.session
        os.write(self._send, json.dumps(message).encode() + b"\0")
        while True:
            found = self._next()
            self._note(found)
            if found.get("id") == number:
                if "error" in found:
                    raise RuntimeError(f"{method}: {found['error']}")
                return found["result"]

    def open(self, url: str, width: int, height: int, *, is_dark: bool = False) -> None:
        """Open an address in a window of that size, and wait until it is loaded."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=1, mobile=width < 600,
        )  # fmt: skip
        scheme = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Page.navigate", url="about:blank")
        self.call("Page.navigate", url=url)
        until = time.monotonic() + _SECONDS
        while (
            self.value("document.readyState") != "complete"
            or self.value("location.href") == "about:blank"
        ):
            if time.monotonic() > until:
                raise TimeoutError(url)
            time.sleep(0.05)

    def value(self, expression: str) -> Any:
        """The value of an expression in the page, as plain data."""
        found = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in found:
            raise RuntimeError(str(found["exceptionDetails"]))
        return found["result"].get("value")

    def key(self, name: str) -> None:
        """Press a key, such as "Tab" or "Enter"."""
        code = {"Tab": 9, "Enter": 13, "ArrowLeft": 37, "ArrowRight": 39, "Escape": 27}[name]
        text = {"text": "\r"} if name == "Enter" else {}
        for kind in ("keyDown", "keyUp"):
            self.call(
                "Input.dispatchKeyEvent", type=kind, key=name, code=name,
                windowsVirtualKeyCode=code, **(text if kind == "keyDown" else {}),
            )  # fmt: skip

    def screenshot(self, path: Path, *, whole: bool = False) -> None:
        """Write what is seen, or all of the page, as PNG."""
        clip = {"x": 0, "y": 0, "scale": 1, "width": self.value("innerWidth")}
        clip["height"] = self.value("document.documentElement.scrollHeight")
        more = {"clip": clip, "captureBeyondViewport": True} if whole else {}
        found = self.call("Page.captureScreenshot", **more)
        path.write_bytes(base64.b64decode(found["data"]))

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            more = os.read(self._receive, 1 << 16)
            if not more:
                raise RuntimeError("Chromium ended.")
            self._rest += more
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)

    def _note(self, message: dict[str, Any]) -> None:
        found = message.get("params", {})
        if message.get("method") == "Runtime.exceptionThrown":
            self.complaints.append(str(found["exceptionDetails"]))
        elif message.get("method") == "Runtime.consoleAPICalled" and found["type"] != "log":
            self.complaints.append(str(found["args"]))
        elif message.get("method") == "Log.entryAdded" and found["entry"]["level"] != "verbose":
            self.complaints.append(str(found["entry"]))


@contextlib.contextmanager
def chromium() -> Iterator[Tab]:
    """A browser with one empty page, which ends with the block."""
    assert CHROMIUM is not None
    to_read, to_write = os.pipe()
    from_read, from_write = os.pipe()

    # Its helpers may write on for a moment after it has ended.
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        process = subprocess.Popen(
            [
                # The browser reads commands from 3 and answers on 4.
                "bash", "-c", f'exec "$@" 3<&{to_read} 4>&{from_write}', "bash",
                CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
                "--disable-dev-shm-usage", "--no-first-run", "--remote-debugging-pipe",
                f"--user-data-dir={profile}", "about:blank",
            ],
            pass_fds=(to_read, from_write), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(to_read)
        os.close(from_write)
        tab = Tab(to_write, from_read)
        try:
            targets = tab.call("Target.getTargets")["targetInfos"]
            target = next(each["targetId"] for each in targets if each["type"] == "page")
            found = tab.call("Target.attachToTarget", targetId=target, flatten=True)
            tab.session = found["sessionId"]
            for domain in ("Page", "Runtime", "Log"):
                tab.call(f"{domain}.enable")
            yield tab
        finally:
            process.terminate()
            process.wait()
            os.close(to_write)
            os.close(from_read)


def main() -> None:
    """Take one screenshot."""
    page, output, width, height, *options = sys.argv[1:]
    with chromium() as tab:
        tab.open(
            page if ":" in page else Path(page).resolve().as_uri(),
            int(width),
            int(height),
            is_dark="dark" in options,
        )
        tab.screenshot(Path(output), whole="whole" in options)
        print(*tab.complaints, sep="\n")
        print(tab.value("[innerWidth, document.documentElement.scrollWidth]"))


if __name__ == "__main__":
    main()
