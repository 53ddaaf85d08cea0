"""Headless Chromium, driven through its DevTools protocol over one websocket: just what the dashboard's tests need."""

from __future__ import annotations

import base64
import itertools
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from websockets.sync.client import ClientConnection, connect

PATIENCE = 20.0  # seconds


def executable() -> str | None:
    """The browser on PATH, if there is one."""
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class Browser:
    """One Chromium with a profile of its own; `close` ends it."""

    def __init__(self, program: str) -> None:
        self._profile = tempfile.mkdtemp(prefix="longtail-dashboard-")
        command = [
            program, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
            "--disable-background-networking", "--hide-scrollbars", "--force-color-profile=srgb",
            "--remote-debugging-port=0", f"--user-data-dir={self._profile}", "about:blank",
        ]  # fmt: skip
        environment = {**os.environ, "TZ": "UTC", "LANG": "C.UTF-8"}
        self._process = subprocess.Popen(
            command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )
        self._stack = ExitStack()
        self._socket = self._connect()
        self._numbers = itertools.count(1)
        self._events: dict[str, list[dict[str, Any]]] = {}

    def _connect(self) -> ClientConnection:
        announced = Path(self._profile) / "DevToolsActivePort"
        deadline = time.monotonic() + PATIENCE
        while not (announced.exists() and announced.read_text().count("\n") == 1):
            if self._process.poll() is not None or time.monotonic() > deadline:
                self._process.kill()
                raise RuntimeError(f"expected a browser, found one that does not start: {self._process.args!r}")
            time.sleep(0.05)
        port, path = announced.read_text().splitlines()
        # A thread's pings draw from `random`, which other tests in this process have seeded.
        socket = connect(f"ws://127.0.0.1:{port}{path}", max_size=None, open_timeout=PATIENCE, ping_interval=None)
        return self._stack.enter_context(socket)

    def send(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        """One command and its result; events that arrive meanwhile are kept by session."""
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": parameters}
        self._socket.send(json.dumps(message if session is None else {**message, "sessionId": session}))
        while True:
            answer = json.loads(self._socket.recv(timeout=PATIENCE))
            if answer.get("id") == number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                result: dict[str, Any] = answer["result"]
                return result
            self._events.setdefault(answer.get("sessionId", ""), []).append(answer)

    def events(self, session: str) -> list[dict[str, Any]]:
        """What a session's page reported so far."""
        return self._events.get(session, [])

    def close(self) -> None:
        """Ends the browser and removes its profile."""
        self.send("Browser.close")
        self._stack.close()
        try:
            self._process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        shutil.rmtree(self._profile, ignore_errors=True)


class Page:
    """One tab with a storage of its own."""

    def __init__(
        self,
        browser: Browser,
        url: str,
        *,
        width: int = 1280,
        height: int = 900,
        media: dict[str, str] | None = None,
        before: str = "",
    ) -> None:
        self._browser = browser
        self._context = browser.send("Target.createBrowserContext")["browserContextId"]
        self._target = browser.send("Target.createTarget", url="about:blank", browserContextId=self._context)[
            "targetId"
        ]
        self._session = browser.send("Target.attachToTarget", targetId=self._target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.send(f"{domain}.enable")
        self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 500,
        )
        features = [{"name": name, "value": value} for name, value in (media or {}).items()]
        self.send("Emulation.setEmulatedMedia", features=features)
        self.send("Page.addScriptToEvaluateOnNewDocument", source=before)
        self.send("Page.navigate", url=url)
        self.until("location.href !== 'about:blank' && document.readyState === 'complete'")

    def close(self) -> None:
        """Closes the tab and forgets its storage."""
        self._browser.send("Target.disposeBrowserContext", browserContextId=self._context)

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """One command to this tab."""
        return self._browser.send(method, self._session, **parameters)

    def run(self, expression: str) -> Any:
        """The value of a JavaScript expression, promises awaited."""
        answer = self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(f"{expression}: {answer['exceptionDetails']['exception'].get('description')}")
        return answer["result"].get("value")

    def until(self, expression: str, wanted: Callable[[Any], bool] = bool) -> Any:
        """The expression's value once it is as wanted."""
        deadline = time.monotonic() + PATIENCE
        while not wanted(value := self.run(expression)):
            if time.monotonic() > deadline:
                raise AssertionError(f"expected {expression} to come true, received {value!r}")
            time.sleep(0.02)
        return value

    def text(self, selector: str) -> str:
        """The text that a reader sees in an element, white space as one space."""
        return " ".join(str(self.run(f"document.querySelector({json.dumps(selector)}).innerText")).split())

    def press(self, key: str) -> None:
        """One key, as from the keyboard."""
        codes = {"Tab": 9, "ArrowRight": 39, "ArrowLeft": 37, "Enter": 13}
        extra = {"text": "\r"} if key == "Enter" else {}
        for kind in ("keyDown", "keyUp"):
            self.send("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=codes[key], **extra)

    def problems(self) -> list[str]:
        """Exceptions, console errors and policy violations; answers with an error status are not among them."""
        self.run("0")
        found = []
        for event in self._browser.events(self._session):
            parameters = event.get("params", {})
            if event["method"] == "Runtime.exceptionThrown":
                found.append(json.dumps(parameters["exceptionDetails"]))
            elif event["method"] == "Runtime.consoleAPICalled" and parameters["type"] in ("error", "warning", "assert"):
                found.append(json.dumps(parameters["args"]))
            elif event["method"] == "Log.entryAdded" and parameters["entry"]["source"] != "network":
                found.append(f"{parameters['entry']['level']}: {parameters['entry']['text']}")
        return found

    def screenshot(self, path: Path, *, whole: bool = True) -> None:
        """The page as PNG."""
        answer = self.send("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(answer["data"]))
