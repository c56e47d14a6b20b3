"""A browser for tests, with nothing but a pipe to it."""

from __future__ import annotations

import itertools
import json
import os
import select
import subprocess
from pathlib import Path
from typing import Any

_SECONDS = 30  # until it is believed to hang


class Browser:
    """Chromium without a window, spoken to over a pipe in its own protocol."""

    def __init__(self, program: str, profile: Path) -> None:
        told, self.tell = os.pipe()
        self.hear, said = os.pipe()
        flags = f"--headless --no-sandbox --disable-gpu --remote-debugging-pipe --user-data-dir={profile}"
        script = f"exec {program} {flags} about:blank 3<&{told} 4>&{said} 2>/dev/null"
        self.process = subprocess.Popen(["bash", "-c", script], pass_fds=(told, said))
        os.close(told)
        os.close(said)
        self.numbers, self.rest, self.events = itertools.count(1), b"", list[dict[str, Any]]()
        self.session: dict[str, str] = {}
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = {"sessionId": self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]}
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Send one command, and wait for its answer; what happens meanwhile is kept in `events`."""
        number = next(self.numbers)
        message = {"id": number, "method": method, "params": params} | self.session
        os.write(self.tell, json.dumps(message).encode() + b"\0")
        while (answer := self.read()).get("id") != number:
            self.events.append(answer)
        assert "error" not in answer, answer
        return dict(answer["result"])

    def read(self) -> dict[str, Any]:
        """The next message."""
        while b"\0" not in self.rest:
            ready, _, _ = select.select([self.hear], [], [], _SECONDS)
            data = os.read(self.hear, 1 << 20) if ready else b""
            assert data, "the browser ended, or does not answer"
            self.rest += data
        one, self.rest = self.rest.split(b"\0", 1)
        return dict(json.loads(one))

    def show(self, path: Path, width: int, theme: str) -> None:
        """Open a page in a window of this width, light or dark, and wait until it is there."""
        self.events.clear()
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=800, deviceScaleFactor=1, mobile=width < 600
        )
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": theme}])
        self.call("Page.navigate", url=path.as_uri())
        while not any(event["method"] == "Page.loadEventFired" for event in self.events):
            self.events.append(self.read())

    def ask(self, expression: str) -> Any:
        """The value of an expression in the page."""
        return self.call("Runtime.evaluate", expression=expression, returnByValue=True)["result"].get("value")

    def hover(self, selector: str) -> None:
        """Put the pointer on the first element that fits."""
        element = f"document.querySelector({json.dumps(selector)})"
        self.ask(f"{element}.scrollIntoView({{block: 'center'}})")
        x, y = self.ask(f"(r => [r.x + r.width / 2, r.y + r.height / 2])({element}.getBoundingClientRect())")
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def close(self) -> None:
        """End the browser."""
        self.process.terminate()
        self.process.wait(10)
        os.close(self.tell)
        os.close(self.hear)
