"""A headless Chromium: opens pages, says what they show, takes pictures.

It is driven by the DevTools protocol over one WebSocket.
"""

from __future__ import annotations

import asyncio
import base64
import json
import shutil
import subprocess
import tempfile
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, Self, TypeVar

import aiohttp

T = TypeVar("T")
_PATIENCE_S = 60.0


def find_chromium() -> str | None:
    return shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


class Chromium:
    """A browser with a profile of its own; a context manager that ends it."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._number = 0

    def __enter__(self) -> Self:
        program = find_chromium()
        assert program is not None, "install chromium"
        self._profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        self._process = subprocess.Popen(
            [
                program,
                *("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"),
                *(
                    "--no-proxy-server",
                    "--no-first-run",
                    "--disable-background-networking",
                    "--force-color-profile=srgb",
                ),
                f"--user-data-dir={self._profile.name}",
                "--remote-debugging-port=0",
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            port, path = self._address()
            self._client = self._do(_client())
            self._socket = self._do(self._client.ws_connect(f"ws://127.0.0.1:{port}{path}", max_msg_size=0))
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._do(self._socket.close())
        self._do(self._client.close())
        self._end()

    def page(self, width: int = 1280, height: int = 800, *, scale: float = 1.0, dark: bool = False) -> Page:
        """Opens an empty page of this size in CSS pixels; `scale` is the device pixels for each."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = Page(self, session, scale)
        page.call("Page.enable")
        page.call("Network.enable")
        page.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=scale,
            mobile=width < 600,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        page.call("Emulation.setEmulatedMedia", features=[scheme])
        return page

    def call(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        return self._do(self._call(method, session, parameters))

    async def _call(self, method: str, session: str | None, parameters: dict[str, Any]) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        await self._socket.send_json(message | ({"sessionId": session} if session else {}))
        while True:  # events come between; nothing here needs them
            answer = json.loads(await asyncio.wait_for(self._socket.receive_str(), _PATIENCE_S))
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return dict(answer["result"])

    def _do(self, work: Coroutine[Any, Any, T] | Any) -> T:
        return self._loop.run_until_complete(work)

    def _address(self) -> tuple[str, str]:
        file = Path(self._profile.name) / "DevToolsActivePort"
        end = time.monotonic() + _PATIENCE_S
        while time.monotonic() < end and self._process.poll() is None:
            if file.exists() and len(lines := file.read_text().splitlines()) == 2:
                return lines[0], lines[1]
            time.sleep(0.05)
        raise AssertionError("chromium did not start")

    def _end(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._loop.close()
        self._profile.cleanup()


class Page:
    def __init__(self, browser: Chromium, session: str, scale: float) -> None:
        self._browser, self._session, self._scale = browser, session, scale

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        return self._browser.call(method, self._session, **parameters)

    def send_headers(self, headers: dict[str, str]) -> None:
        self.call("Network.setExtraHTTPHeaders", headers=headers)

    def open(self, url: str) -> None:
        answer = self.call("Page.navigate", url=url)
        assert not answer.get("errorText"), f"{url}: {answer['errorText']}"
        end = time.monotonic() + _PATIENCE_S
        while self.run("document.readyState") != "complete":
            assert time.monotonic() < end, f"{url} does not load"
            time.sleep(0.05)

    def close(self) -> None:
        self.call("Page.close")

    def run(self, script: str) -> Any:
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def text(self) -> str:
        return str(self.run("document.body ? document.body.innerText : ''"))

    def wait_text(self, *wanted: str, patience_s: float = _PATIENCE_S) -> str:
        end = time.monotonic() + patience_s
        while not all(word in (text := self.text()) for word in wanted):
            assert time.monotonic() < end, f"the page does not show {wanted}:\n{text[:2000]}"
            time.sleep(0.1)
        return text

    def picture(self, selector: str = "body", height: int | None = None) -> bytes:
        """Returns a PNG of the first element found, or of its top, in CSS pixels."""
        script = f"""(() => {{ const r = document.querySelector({json.dumps(selector)}).getBoundingClientRect();
            return [r.x + scrollX, r.y + scrollY, r.width, r.height] }})()"""
        self.call("Page.bringToFront")  # a page in the background may never be drawn
        x, y, width, whole = self.run(script)
        clip = {"x": x, "y": y, "width": width, "height": min(height or whole, whole), "scale": 1}
        data = self.call("Page.captureScreenshot", format="png", clip=clip, captureBeyondViewport=True)["data"]
        return base64.b64decode(data)


async def _client() -> aiohttp.ClientSession:
    return aiohttp.ClientSession()
