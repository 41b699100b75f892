"""A headless Chromium over its debugging pipe: no driver, no port, nothing but the browser."""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-sync "
    "--disable-background-networking --disable-component-update --remote-debugging-pipe"
)


def find_browser() -> str | None:
    """The browser's path, or None on a machine without one."""
    return shutil.which("chromium") or shutil.which("google-chrome")


class Tab:
    """One page: commands of the DevTools protocol, and the events that came meanwhile."""

    def __init__(self, to_browser: int, from_browser: int):
        self._to = to_browser
        self._from = from_browser
        self._rest = b""
        self._number = 0
        self._session: str | None = None
        self.events: list[dict[str, Any]] = []
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        attached = self.send("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **parameters: Any) -> Any:
        """Run a command and wait for its result. Raises RuntimeError if the browser refuses it."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]
            self.events.append(answer)

    def open(self, page: Path, width: int, *, dark: bool = False, touch: bool = False) -> None:
        """Show a page at a viewport's width, and wait until it is loaded and drawn."""
        self.events.clear()
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": touch}
        self.send("Emulation.setDeviceMetricsOverride", **size)
        self.scheme(dark=dark)
        self.send("Page.navigate", url=page.as_uri())
        self.wait_for("Page.loadEventFired")
        self.settle()

    def scheme(self, *, dark: bool) -> None:
        """Prefer light or dark from now on."""
        value = "dark" if dark else "light"
        features = [{"name": "prefers-color-scheme", "value": value}]
        self.send("Emulation.setEmulatedMedia", features=features)

    def settle(self) -> None:
        """Wait until the browser has drawn two more frames."""
        self.run("new Promise(go => requestAnimationFrame(() => requestAnimationFrame(go)))")

    def run(self, script: str) -> Any:
        """The value of an expression on the page. Raises RuntimeError if it throws."""
        found = self.send(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        if "exceptionDetails" in found:
            raise RuntimeError(found["exceptionDetails"])
        return found["result"].get("value")

    def wait_for(self, method: str) -> None:
        """Wait for an event."""
        while not self.seen(method):
            self.events.append(self._receive())

    def seen(self, *methods: str) -> list[dict[str, Any]]:
        """What the events of these names said, since the page was opened."""
        return [event["params"] for event in self.events if event.get("method") in methods]

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            chunk = os.read(self._from, 1 << 20)
            if not chunk:
                raise RuntimeError("the browser has gone")
            self._rest += chunk
        line, _, self._rest = self._rest.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        return message


@contextmanager
def open_browser(browser: str, profile: Path) -> Iterator[Tab]:
    """Start a browser with a profile of its own; it ends with the block."""
    read_commands, write_commands = os.pipe()
    read_answers, write_answers = os.pipe()
    # The protocol's pipes are the descriptors 3 and 4 of the browser.
    script = f'exec "$0" "$@" 3<&{read_commands} 4>&{write_answers}'
    command = ["bash", "-c", script, browser, *FLAGS.split(), f"--user-data-dir={profile}"]
    process = subprocess.Popen(
        command,
        pass_fds=(read_commands, write_answers),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(read_commands)
    os.close(write_answers)
    try:
        yield Tab(write_commands, read_answers)
    finally:
        process.terminate()
        process.wait(timeout=20)
        os.close(write_commands)
        os.close(read_answers)
