"""A headless Chromium, driven over its DevTools protocol."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import shutil
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--remote-debugging-port=0",
)
WAIT_SECONDS = 30.0


def program() -> str | None:
    return next((found for name in PROGRAMS if (found := shutil.which(name))), None)


class Page:
    """One tab. What its scripts throw, and what its security policy blocks, is in ``complaints``."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._number = 0
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._reading = asyncio.ensure_future(self._read())
        self.complaints: list[str] = []

    async def _read(self) -> None:
        async for message in self._socket:
            told = json.loads(message.data)
            if "id" in told:
                self._answers.pop(told["id"]).set_result(told)
            elif told["method"] == "Runtime.exceptionThrown":
                self.complaints.append(json.dumps(told["params"]["exceptionDetails"]))
            elif told["method"] == "Log.entryAdded" and told["params"]["entry"]["level"] == "error":
                self.complaints.append(json.dumps(told["params"]["entry"]))

    async def call(self, method: str, **parameters: Any) -> Any:
        self._number += 1
        self._answers[self._number] = answer = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": self._number, "method": method, "params": parameters})
        told = await asyncio.wait_for(answer, WAIT_SECONDS)
        assert "error" not in told, told
        return told["result"]

    async def open(self, address: str) -> None:
        for domain in ("Page", "Runtime", "Log"):
            await self.call(f"{domain}.enable")
        await self.call("Page.navigate", url=address)

    async def run(self, script: str) -> Any:
        """The value of a JavaScript expression; a promise is waited for."""
        told = await self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in told, told["exceptionDetails"]
        return told["result"].get("value")

    async def until(self, script: str) -> Any:
        """Wait until an expression is true; the page is asked again with every frame it draws."""
        waiting = f"""new Promise((resolve, reject) => {{
            const end = Date.now() + {WAIT_SECONDS * 900};
            const look = () => {{
                let value = null;
                try {{ value = ({script}); }} catch (error) {{ value = null; }}
                if (value) resolve(value);
                else if (Date.now() > end) reject(new Error("waited in vain"));
                else setTimeout(look, 30);
            }};
            look();
        }})"""
        return await self.run(waiting)

    async def show_as(self, width: int, height: int, scale: float = 1, dark: bool = False) -> None:
        phone = width < 600
        await self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=scale,
            mobile=phone,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.call("Emulation.setEmulatedMedia", features=[scheme])

    async def picture(self, file: Path, whole: bool = False) -> None:
        told = await self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        file.write_bytes(base64.b64decode(told["data"]))

    async def close(self) -> None:
        self._reading.cancel()
        await self._socket.close()


@asynccontextmanager
async def browsing(folder: Path) -> AsyncIterator[Page]:
    """A browser with one empty tab; ``folder`` is its profile."""
    found = program()
    assert found is not None, "there is no chromium"
    process = await asyncio.create_subprocess_exec(
        found,
        *FLAGS,
        f"--user-data-dir={folder}",
        "about:blank",
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    try:
        async with aiohttp.ClientSession() as session:
            port = await asyncio.wait_for(_port(process), WAIT_SECONDS)
            async with session.get(f"http://127.0.0.1:{port}/json/list") as answer:
                tabs = [tab for tab in await answer.json() if tab["type"] == "page"]
            socket = await session.ws_connect(tabs[0]["webSocketDebuggerUrl"], max_msg_size=0)
            page = Page(socket)
            yield page
            await page.close()
    finally:
        # Every process of the browser: one that is left would hold the pipe open, and the test with it.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await asyncio.wait_for(process.wait(), WAIT_SECONDS)


async def _port(process: asyncio.subprocess.Process) -> str:
    assert process.stderr is not None
    async for line in process.stderr:
        if line.startswith(b"DevTools listening on ws://"):
            return line.decode().split("/")[2].rpartition(":")[2]
    raise AssertionError("chromium ended before it listened")
