"""A headless Chromium, driven through the pipe of its DevTools protocol: messages of JSON, a zero byte after each."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = (
    "--headless=new",
    "--remote-debugging-pipe",
    "--no-sandbox",  # it looks at our own page only, and root has no other choice
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-extensions",
    "--disable-sync",
    "--no-first-run",
    "--hide-scrollbars",
)
PATIENCE_S = 60.0


class Page:
    """One tab. faults: what it complained of: exceptions, and what its policy or the server refused."""

    def __init__(self, told: int, heard: int) -> None:
        self._told, self._heard = told, heard
        self._next = 0
        self._left = b""
        self._session: str | None = None
        self.faults: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> Any:
        """Of the protocol. Raises AssertionError for its error."""
        self._next += 1
        message = {"id": self._next, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._told, json.dumps(message).encode() + b"\0")
        give_up_at = time.monotonic() + PATIENCE_S
        while (answer := self._read(give_up_at)).get("id") != self._next:
            self._note(answer)
        assert "error" not in answer, (method, answer["error"])
        return answer["result"]

    def _read(self, give_up_at: float) -> dict[str, Any]:
        while b"\0" not in self._left:
            ready, _, _ = select.select([self._heard], [], [], max(0.0, give_up_at - time.monotonic()))
            assert ready, "the browser does not answer"
            data = os.read(self._heard, 1 << 16)
            assert data, "the browser has ended"
            self._left += data
        message, self._left = self._left.split(b"\0", 1)
        found: dict[str, Any] = json.loads(message)
        return found

    def _note(self, event: dict[str, Any]) -> None:
        params = event.get("params", {})
        if event.get("method") == "Runtime.exceptionThrown":
            self.faults.append(json.dumps(params["exceptionDetails"])[:600])
        elif event.get("method") == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.faults.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")

    def run(self, script: str) -> Any:
        """The value of an expression on the page; a promise is waited for."""
        found = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, (script, found["exceptionDetails"])
        return found["result"].get("value")

    def wait(self, script: str, timeout_s: float = PATIENCE_S) -> Any:
        """The expression's value, once it is true."""
        give_up_at = time.monotonic() + timeout_s
        while not (value := self.run(script)):
            assert time.monotonic() < give_up_at, (script, self.run("document.body.innerText"), self.faults)
            time.sleep(0.05)
        return value

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)
        self.wait(f"location.href.startsWith({json.dumps(url)}) && document.readyState == 'complete'")

    def type(self, text: str) -> None:
        """Into what has the focus."""
        self.call("Input.insertText", text=text)

    def press(self, name: str, code: int, text: str = "") -> None:
        """A key, as if by hand. code: Windows' number of it."""
        common = {"key": name, "code": name, "windowsVirtualKeyCode": code}
        self.call("Input.dispatchKeyEvent", type="keyDown", text=text, **common)
        self.call("Input.dispatchKeyEvent", type="keyUp", **common)

    def resize(self, width: int, height: int, *, scale: float = 1, mobile: bool = False) -> None:
        size = {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": mobile}
        self.call("Emulation.setDeviceMetricsOverride", **size)

    def prefer(self, **features: str) -> None:
        """As a reader's system does: color_scheme="dark", reduced_motion="reduce"."""
        asked = [{"name": f"prefers-{name.replace('_', '-')}", "value": value} for name, value in features.items()]
        self.call("Emulation.setEmulatedMedia", features=asked)

    def screenshot(self, path: Path, **options: Any) -> None:
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", **options)["data"]))


@contextlib.contextmanager
def browsing() -> Iterator[Page]:
    """A browser with a profile of its own, which goes with it."""
    assert CHROMIUM is not None
    hears, told = os.pipe()
    heard, tells = os.pipe()
    with tempfile.TemporaryDirectory(prefix="perdure-browser-", ignore_cleanup_errors=True) as profile:
        command = f'exec "$0" "$@" 3<&{hears} 4>&{tells}'
        process = subprocess.Popen(
            ["bash", "-c", command, CHROMIUM, *FLAGS, f"--user-data-dir={profile}"],
            pass_fds=(hears, tells),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(hears)
        os.close(tells)
        try:
            page = Page(told, heard)
            yield page
            with contextlib.suppress(AssertionError):
                page._session = None
                page.call("Browser.close")
            process.wait(20)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
            os.close(told)
            os.close(heard)
