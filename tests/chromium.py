"""A headless Chromium that opens one page and tells what happened, by its DevTools protocol."""

import asyncio
import shutil
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# Lightning's file systems bring it along.
import aiohttp

PROGRAM = shutil.which("chromium") or shutil.which("chromium-browser")
_OPTIONS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--remote-debugging-port=0")


@dataclass
class Visit:
    """What happened while a page was open.

    Attributes:
        requests: every address asked for, the page's own first.
        said: what was written to the console, errors of the browser among it.
        answers: what each question, a JavaScript expression, came to.
    """

    requests: list[str] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    answers: dict[str, Any] = field(default_factory=dict)


def visit(page: Path, folder: Path, questions: dict[str, str], *, dark: bool = False) -> Visit:
    """Open a page in a browser of its own, whose profile lies in `folder`, and ask it."""
    command = [str(PROGRAM), *_OPTIONS, f"--user-data-dir={folder}", "about:blank"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as browser:
        try:
            return asyncio.run(_visit(page.as_uri(), _port(folder), questions, dark))
        finally:
            browser.terminate()


def _port(folder: Path) -> int:
    told, patience = folder / "DevToolsActivePort", time.monotonic() + 60
    while not (told.exists() and told.read_text().count("\n")):
        if time.monotonic() > patience:
            raise TimeoutError("Chromium did not open its DevTools port within a minute")
        time.sleep(0.05)
    return int(told.read_text().splitlines()[0])


async def _visit(address: str, port: int, questions: dict[str, str], dark: bool) -> Visit:
    async with aiohttp.ClientSession() as session:
        async with session.get(f"http://127.0.0.1:{port}/json/list") as listed:
            (tab,) = [target for target in await listed.json() if target["type"] == "page"]
        async with session.ws_connect(tab["webSocketDebuggerUrl"], max_msg_size=0) as socket:
            talk = _Talk(socket)
            for domain in ("Page", "Network", "Log", "Runtime"):
                await talk.ask(f"{domain}.enable")
            scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
            await talk.ask("Emulation.setEmulatedMedia", features=[scheme])
            await talk.ask("Page.navigate", url=address)
            await talk.until("Page.loadEventFired")
            for name, expression in questions.items():
                answer = await talk.ask("Runtime.evaluate", expression=expression, returnByValue=True)
                talk.visit.answers[name] = answer["result"]["value"]
            return talk.visit


class _Talk:
    def __init__(self, socket: Any) -> None:
        self.visit = Visit()
        self._socket, self._number = socket, 0

    async def ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        await self._socket.send_json({"id": self._number, "method": method, "params": parameters})
        while (message := await self._next()).get("id") != self._number:
            pass
        return message["result"]  # type: ignore[no-any-return]

    async def until(self, event: str) -> None:
        while (await self._next()).get("method") != event:
            pass

    async def _next(self) -> dict[str, Any]:
        message = await self._socket.receive_json(timeout=60)
        parameters = message.get("params", {})
        if message.get("method") == "Network.requestWillBeSent":
            self.visit.requests.append(parameters["request"]["url"])
        if message.get("method") in ("Log.entryAdded", "Runtime.consoleAPICalled", "Runtime.exceptionThrown"):
            self.visit.said.append(str(parameters))
        return message  # type: ignore[no-any-return]
