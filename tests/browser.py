"""A headless Chromium for tests, spoken to over a pipe by its DevTools protocol: no driver, no package."""

import base64
import itertools
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome", "chrome")
PATH = next(filter(None, map(shutil.which, NAMES)), None)
# No sandbox of its own: root cannot have it in a container, and the pages are ours.
OPTIONS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--remote-debugging-pipe",
    "--no-first-run",
)
COMPLAINTS = ("Runtime.exceptionThrown", "Log.entryAdded", "Network.requestWillBeSent")


class Browser:
    """One tab."""

    def __init__(self, send: int, receive: int) -> None:
        self.send, self.receive = os.fdopen(send, "wb"), os.fdopen(receive, "rb")
        self.numbers, self.events, self.rest = itertools.count(1), [], b""
        self.session: dict[str, str] = {}
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self.session = {"sessionId": attached["sessionId"]}
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        number = next(self.numbers)
        self.send.write(json.dumps({"id": number, "method": method, "params": parameters} | self.session).encode() + b"\0")
        self.send.flush()
        while (message := self._message()).get("id") != number:
            self.events.append(message)
        assert "error" not in message, (method, message)
        return message["result"]

    def _message(self) -> dict[str, Any]:
        while b"\0" not in self.rest:
            more = os.read(self.receive.fileno(), 1 << 20)
            assert more, "the browser ended"
            self.rest += more
        first, _, self.rest = self.rest.partition(b"\0")
        return json.loads(first)

    def open(self, path: Path, width: int, dark: bool = False) -> list[str]:
        """Load a file; returns what went wrong in it: errors and warnings of the console, exceptions, other requests."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=width < 600)
        self.events.clear()
        self.call("Page.navigate", url=path.as_uri())
        while not any(event["method"] == "Page.loadEventFired" for event in self.events):
            self.events.append(self._message())
        self.js("new Promise(done => setTimeout(done, 50))")
        return list(self._complaints(path.as_uri()))

    def _complaints(self, url: str) -> Iterator[str]:
        for event in self.events:
            loaded = event["method"] == "Network.requestWillBeSent" and event["params"]["request"]["url"] == url
            said = event["method"] == "Runtime.consoleAPICalled" and event["params"]["type"] in ("error", "warning")
            if said or event["method"] in COMPLAINTS and not loaded:
                yield json.dumps(event["params"])[:500]

    def js(self, expression: str) -> Any:
        """The value of an expression in the page."""
        done = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in done, done
        return done["result"].get("value")

    def screenshot(self, path: Path, whole: bool = True) -> None:
        shot = self.call("Page.captureScreenshot", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(shot["data"]))


@contextmanager
def browser(profile: Path) -> Iterator[Browser]:
    """A browser whose files are in `profile`; it reads its commands from descriptor 3, and answers on 4."""
    (theirs_in, ours_out), (ours_in, theirs_out) = os.pipe(), os.pipe()
    command = f'exec 18<&{theirs_in} 19>&{theirs_out} 3<&18 4>&19; exec "$@"'  # by way of 18 and 19: theirs may be 3 or 4
    process = subprocess.Popen(
        ["bash", "-c", command, "bash", PATH, *OPTIONS, f"--user-data-dir={profile}"],
        pass_fds=(theirs_in, theirs_out), stderr=subprocess.DEVNULL,
    )  # fmt: skip
    for end in (theirs_in, theirs_out):
        os.close(end)
    try:
        yield Browser(ours_out, ours_in)
    finally:
        process.kill()
        process.wait()
