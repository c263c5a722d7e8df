"""A headless Chromium, driven over a pipe by its DevTools protocol: JSON messages that end in a null byte."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")


def find() -> str | None:
    """Return the path of an installed browser."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """A page of a browser, which ends with the `with` block."""

    def __init__(self, path: str) -> None:
        self._folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        to_browser, self._out = os.pipe()
        self._in, from_browser = os.pipe()
        # It reads descriptor 3 and writes 4; a shell puts the pipes there.
        moves = f"exec {to_browser}<&{to_browser} 3<&{to_browser} 4>&{from_browser}"
        options = f"--headless --no-sandbox --disable-gpu --hide-scrollbars --user-data-dir={self._folder.name}"
        self._process = subprocess.Popen(
            ["bash", "-c", f'{moves}; exec "$0" {options} --remote-debugging-pipe about:blank', path],
            pass_fds=(to_browser, from_browser), stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(to_browser)
        os.close(from_browser)
        self._buffer, self._n, self._session, self.errors = b"", 0, "", list[str]()
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._in)
        os.close(self._out)
        self._folder.cleanup()

    def call(self, method: str, **params: Any) -> Any:
        """Call a method of the protocol, and collect the errors that pages print until it returns."""
        self._n += 1
        message = {"id": self._n, "method": method, "params": params}
        os.write(
            self._out, json.dumps(message | ({"sessionId": self._session} if self._session else {})).encode() + b"\0"
        )
        while True:
            while b"\0" not in self._buffer:
                read = os.read(self._in, 1 << 20)
                assert read, "the browser has ended"
                self._buffer += read
            text, _, self._buffer = self._buffer.partition(b"\0")
            answer = json.loads(text)
            if answer.get("method") == "Log.entryAdded" and answer["params"]["entry"]["level"] == "error":
                self.errors.append(f"{answer['params']['entry']['text']} {answer['params']['entry'].get('url', '')}")
            if answer.get("method") == "Runtime.exceptionThrown":
                self.errors.append(str(answer["params"]["exceptionDetails"]))
            if answer.get("id") == self._n:
                assert "error" not in answer, answer["error"]
                return answer["result"]

    def run(self, code: str) -> Any:
        """Return the value of a JavaScript expression."""
        out = self.call("Runtime.evaluate", expression=code, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in out, out["exceptionDetails"]
        return out["result"].get("value")

    def wait_for(self, code: str, seconds: float = 600) -> Any:
        """Wait until a JavaScript expression is true, and return it."""
        end = time.monotonic() + seconds
        while not (value := self.run(code)):
            assert time.monotonic() < end, f"{code} is {value!r} after {seconds} s"
            time.sleep(0.05)
        return value

    def open(self, url: str) -> None:
        self.run("window.isOld = true")
        self.call("Page.navigate", url=url)
        self.wait_for("!window.isOld && document.readyState == 'complete'")

    def resize(self, width: int, height: int = 900, *, dark: bool = False) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def screenshot(self, file: Path) -> None:
        file.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))
