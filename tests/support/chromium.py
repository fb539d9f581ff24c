"""A headless Chromium for tests: the DevTools protocol over a pipe, with real mouse and key events."""

from __future__ import annotations

import fcntl
import json
import os
import select
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from support.needs import program

PATH = program("chromium")

_FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--hide-scrollbars", "--remote-debugging-pipe",
)  # fmt: skip
_PATIENCE = 60.0
_DRAWN = "!!document.getElementById('canvas')?.dataset.to"
_KEY_CODES = {"Escape": 27, "ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40}


class Browser:
    """A browser with one page. faults: faults that the page reported. urls: requests of the page."""

    def __init__(self, profile: Path, width: int = 1400, height: int = 1000) -> None:
        assert PATH
        ends = [fd for pair in (os.pipe(), os.pipe()) for fd in pair]
        theirs_in, self._out, self._in, theirs_out = (fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 10) for fd in ends)
        for fd in ends:
            os.close(fd)
        command = [PATH, *_FLAGS, f"--user-data-dir={profile}", f"--window-size={width},{height}", "about:blank"]
        self._process = subprocess.Popen(
            ["bash", "-c", f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}', "bash", *command],
            pass_fds=(theirs_in, theirs_out), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(theirs_in)
        os.close(theirs_out)
        self._buffer = b""
        self._number = 0
        self._session = ""
        self.faults: list[str] = []
        self.urls: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.resize(width, height)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._out)  # the browser ends with its pipe
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._in)

    def resize(self, width: int, height: int) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Calls a method of the protocol and waits for its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            reply = self._receive()
            if reply.get("id") == self._number:
                assert "error" not in reply, f"{method}: {reply['error']}"
                return dict(reply["result"])
            self._note(reply)

    def _receive(self) -> dict[str, Any]:
        deadline = time.monotonic() + _PATIENCE
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._in], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, "the browser does not answer"
            part = os.read(self._in, 1 << 20)
            assert part, "the browser ended"
            self._buffer += part
        text, _, self._buffer = self._buffer.partition(b"\0")
        return dict(json.loads(text))

    def _note(self, event: dict[str, Any]) -> None:
        parameters = event.get("params", {})
        match event.get("method"):
            case "Network.requestWillBeSent":
                self.urls.append(parameters["request"]["url"])
            case "Runtime.exceptionThrown":
                self.faults.append(json.dumps(parameters["exceptionDetails"]))
            case "Runtime.consoleAPICalled" if parameters["type"] == "error":
                self.faults.append(json.dumps(parameters["args"]))
            case "Log.entryAdded" if parameters["entry"]["level"] == "error":
                self.faults.append(json.dumps(parameters["entry"]))

    def open(self, page: Path, fragment: str = "", ready: str = _DRAWN) -> None:
        """Loads a file, and waits until its script has drawn.

        fragment: the part of the address after the path. ready: an expression that is true from then on.
        """
        self.visit(page.as_uri() + fragment, ready)

    def visit(self, url: str, ready: str) -> None:
        """Loads an address, and waits until an expression is true there."""
        self.call("Page.navigate", url="about:blank")  # a new fragment alone would load nothing
        self.faults, self.urls = [], []
        self.call("Page.navigate", url=url)
        self.wait_for(f"document.readyState === 'complete' && {ready}")

    def value(self, expression: str) -> Any:
        """The value of an expression on the page, after the next frame is painted."""
        script = f"new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done({expression}))))"
        result = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def result(self, promise: str) -> Any:
        """What a promise on the page resolves to."""
        answer = self.call("Runtime.evaluate", expression=promise, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def now(self, expression: str) -> Any:
        """The value of an expression on the page, without waiting for a frame."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def wait_for(self, expression: str) -> None:
        deadline = time.monotonic() + _PATIENCE
        while not self.now(expression):
            assert time.monotonic() < deadline, f"never: {expression}"
            time.sleep(0.02)

    def mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        self.call("Input.dispatchMouseEvent", type=f"mouse{kind}", x=x, y=y, **more)

    def click(self, x: float, y: float) -> None:
        self.mouse("Pressed", x, y, button="left", buttons=1, clickCount=1)
        self.mouse("Released", x, y, button="left", clickCount=1)

    def drag(self, x: float, y: float, dx: float, dy: float = 0.0) -> None:
        self.mouse("Pressed", x, y, button="left", buttons=1, clickCount=1)
        self.mouse("Moved", x + dx / 2, y + dy / 2, button="left", buttons=1)
        self.mouse("Moved", x + dx, y + dy, button="left", buttons=1)
        self.mouse("Released", x + dx, y + dy, button="left", clickCount=1)

    def key(self, key: str, shift: bool = False) -> None:
        text = {"text": key} if len(key) == 1 else {"windowsVirtualKeyCode": _KEY_CODES[key]}
        modifiers = 8 if shift else 0
        self.call("Input.dispatchKeyEvent", type="keyDown", key=key, modifiers=modifiers, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key, modifiers=modifiers)
