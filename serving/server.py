"""A server to measure: one that runs at an address, or an engine started for the purpose."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any

from serving.host import LINE_LIMIT_BYTES, Engine, answer_from_result, launch_to_line
from serving.launch_spec import Launch, Setting
from serving.leftovers import NOTE_SECONDS, SharedMemoryGuard, end_session
from serving.measure import Answer, Ask, Stream, record_stream
from serving.ports import free_port
from serving.processes import descendants, is_tracker, members

Server = Engine
"""What every measurement asks of a server."""
START_SECONDS = 900.0
REQUEST_SECONDS = 600.0
STOP_SECONDS = 60.0
_THREADS = 256
_LOG_CHARACTERS = 1500


class ServerError(RuntimeError):
    """A server that is gone, does not answer, or refuses."""


class EngineProcess:
    """An engine started for a measurement; `await EngineProcess.start(...)`, then `close`."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self._process, self._log = process, log
        self._memory = SharedMemoryGuard(lambda: members(process.pid))
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        self._stopped: set[int] = set()
        self.start_seconds = 0.0

    @classmethod
    async def start(
        cls, launch: Launch, log: Path, *, command: Sequence[str] = ()
    ) -> EngineProcess:
        """Start an engine and wait until it answers.

        Args:
            log: file for what the engine says.
            command: the host's command line without its descriptor; by default `serving.host`.

        Raises:
            ServerError: it ended or did not get ready in time; shows the end of its log.
        """
        ours, theirs = socket.socketpair()
        words = [*(command or (sys.executable, "-m", "serving.host")), str(theirs.fileno())]
        log.parent.mkdir(parents=True, exist_ok=True)
        with open(log, "wb") as output:
            process = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        theirs.close()
        self = cls(process, log)
        reader, self._writer = await asyncio.open_connection(sock=ours, limit=LINE_LIMIT_BYTES)
        ready: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting[0] = ready
        self._reading = asyncio.ensure_future(self._read(reader))
        launch = launch.plus([Setting("port", free_port(), "several engines beside each other")])
        self._writer.write(launch_to_line(launch).encode() + b"\n")
        noting = asyncio.ensure_future(self._note_memory())
        try:
            self.start_seconds = (await self._bounded(ready, START_SECONDS, "start"))[
                "start_seconds"
            ]
            self._memory.note()
        except BaseException:
            await self.close()
            raise
        finally:
            noting.cancel()
        return self

    async def _note_memory(self) -> None:
        """While the engine starts; later it is measured, and not to be disturbed."""
        while True:
            self._memory.note_sometimes()
            await asyncio.sleep(NOTE_SECONDS)

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            while line := await reader.readline():
                message = json.loads(line)
                future = self._waiting.pop(message["id"], None)
                if future is None or future.done():
                    continue
                if "error" in message:
                    future.set_exception(ServerError(f"the engine refused: {message['error']}"))
                else:
                    future.set_result(message["result"])
        except (OSError, ValueError) as error:
            self._fail(f"the line to the engine broke: {error}")
        self._fail("the engine ended")

    def _fail(self, why: str) -> None:
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(ServerError(f"{why}; the end of {self._log}: {self._tail()}"))
        self._waiting.clear()

    def _tail(self) -> str:
        try:
            text = self._log.read_text(errors="replace")
        except OSError:
            return "(no log)"
        return text[-_LOG_CHARACTERS:].strip()

    async def _bounded(self, future: asyncio.Future[Any], seconds: float, what: str) -> Any:
        try:
            return await asyncio.wait_for(future, seconds)
        except TimeoutError as error:
            raise ServerError(
                f"the engine did not answer to {what} within {seconds:.0f} s; the end of "
                f"{self._log}: {self._tail()}"
            ) from error

    async def _call(self, op: str, **values: Any) -> Any:
        ended = self._process.poll() is not None or self._reading is None or self._reading.done()
        if self._writer is None or ended:
            raise ServerError(f"the engine has ended; the end of {self._log}: {self._tail()}")
        number = next(self._numbers)
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting[number] = future
        self._writer.write(json.dumps({"id": number, "op": op, **values}).encode() + b"\n")
        with suppress(OSError):
            # A line that broke fails the future, with the engine's last words.
            await self._writer.drain()
        return await self._bounded(future, REQUEST_SECONDS, op)

    async def ask(self, ask: Ask) -> Answer:
        """One answer, timed beside the engine. Raises ServerError."""
        return answer_from_result(await self._call("ask", ask=asdict(ask)))

    async def info(self) -> dict[str, Any]:
        """SGLang's resolved arguments and its state."""
        found: dict[str, Any] = await self._call("info")
        return found

    async def start_profile(self, folder: str) -> None:
        """Begin a torch trace on every rank."""
        await self._call("start_profile", folder=folder)

    async def stop_profile(self) -> None:
        """End it; the files are written when this returns."""
        await self._call("stop_profile")

    def pause(self) -> None:
        """Stop its processes where they are: idle schedulers ask for work without a rest.

        The host, which waits for a line, is spared: it ends the others if this process dies.
        """
        for pid in descendants(self._process.pid):
            # The tracker of a host that dies has to clean up.
            if not is_tracker(pid):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGSTOP)
                    self._stopped.add(pid)

    def resume(self) -> None:
        """Let them go on, whoever has ended meanwhile."""
        while self._stopped:
            with suppress(ProcessLookupError):
                os.kill(self._stopped.pop(), signal.SIGCONT)

    async def close(self) -> None:
        """End the engine and every process of it."""
        self.resume()
        if self._writer is not None and self._process.poll() is None:
            self._writer.write(json.dumps({"id": -1, "op": "stop"}).encode() + b"\n")
            self._writer.close()
        try:
            with suppress(subprocess.TimeoutExpired):
                await asyncio.to_thread(self._process.wait, STOP_SECONDS)
        finally:
            # Schedulers are in the session that began with the host.
            end_session(self._process, self._memory)
            self._process.wait()
        if self._reading is not None:
            await asyncio.wait([self._reading])


class Turns:
    """Engines on one machine that are asked in turn: all but the one that was asked last rest."""

    def __init__(self) -> None:
        self._awake: EngineProcess | None = None
        self._unanswered = 0

    def add(self, engine: EngineProcess) -> Server:
        """The engine as one of them; it rests until it is asked."""
        engine.pause()
        return InTurn(engine, self)

    @asynccontextmanager
    async def of(self, engine: EngineProcess) -> AsyncIterator[None]:
        """Something is asked of the engine. Raises ServerError while another one answers."""
        if self._awake is not engine:
            if self._unanswered:
                raise ServerError("two engines were asked at the same time, which share a GPU")
            if self._awake is not None:
                self._awake.pause()
            self._awake = engine
            engine.resume()
        self._unanswered += 1
        try:
            yield
        finally:
            self._unanswered -= 1


@dataclass(frozen=True)
class InTurn:
    """An engine that rests while another one is asked."""

    engine: EngineProcess
    turns: Turns

    async def ask(self, ask: Ask) -> Answer:
        """As the engine."""
        async with self.turns.of(self.engine):
            return await self.engine.ask(ask)

    async def info(self) -> dict[str, Any]:
        """As the engine."""
        async with self.turns.of(self.engine):
            return await self.engine.info()

    async def start_profile(self, folder: str) -> None:
        """As the engine."""
        async with self.turns.of(self.engine):
            await self.engine.start_profile(folder)

    async def stop_profile(self) -> None:
        """As the engine."""
        async with self.turns.of(self.engine):
            await self.engine.stop_profile()


class HttpServer:
    """A server that somebody runs at an address."""

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")
        # One thread a request; the default pool has as many as there are processors.
        self._threads = ThreadPoolExecutor(_THREADS)

    async def ask(self, ask: Ask) -> Answer:
        """One streamed answer. Raises ServerError."""
        body = {
            "input_ids": list(ask.token_ids),
            "sampling_params": ask.sampling(),
            "stream": True,
        }
        return await record_stream(self._stream("/generate", body))

    async def _stream(self, path: str, body: dict[str, Any]) -> Stream:
        loop = asyncio.get_running_loop()
        parts: asyncio.Queue[dict[str, Any] | Exception | None] = asyncio.Queue()

        def read() -> None:
            last: Exception | None = None
            try:
                for part in self._parts(path, body):
                    loop.call_soon_threadsafe(parts.put_nowait, part)
            except Exception as error:
                last = error
            loop.call_soon_threadsafe(parts.put_nowait, last)

        done = loop.run_in_executor(self._threads, read)
        while isinstance(part := await parts.get(), dict):
            yield part
        await done
        if isinstance(part, Exception):
            raise ServerError(f"{self._url}{path} failed: {part}") from part

    def _parts(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        with self._open(path, body) as response:
            for line in response:
                text = line.decode().strip()
                if text.startswith("data:") and (data := text[5:].strip()) != "[DONE]":
                    part = json.loads(data)
                    if "error" in part:
                        raise ServerError(str(part["error"]))
                    yield part

    def _open(self, path: str, body: dict[str, Any] | None = None) -> Any:
        request = urllib.request.Request(
            self._url + path,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        return urllib.request.urlopen(request, timeout=REQUEST_SECONDS)

    async def _request(self, path: str, body: dict[str, Any] | None = None) -> bytes:
        def read() -> bytes:
            try:
                with self._open(path, body) as response:
                    data: bytes = response.read()
                    return data
            except (OSError, HTTPException) as error:
                raise ServerError(f"{self._url}{path} failed: {error}") from error

        return await asyncio.get_running_loop().run_in_executor(self._threads, read)

    async def info(self) -> dict[str, Any]:
        """What /server_info says: resolved arguments and state. Raises ServerError."""
        try:
            found: dict[str, Any] = json.loads(await self._request("/server_info"))
        except ValueError as error:
            raise ServerError(f"{self._url}/server_info is not SGLang's: {error}") from error
        return found

    async def start_profile(self, folder: str) -> None:
        """Begin a torch trace; the folder is one of the server's machine."""
        await self._request(
            "/start_profile",
            {
                "output_dir": folder,
                "activities": ["CPU", "GPU"],
                "with_stack": False,
                "record_shapes": False,
            },
        )

    async def stop_profile(self) -> None:
        """End it; the files are written when this returns."""
        await self._request("/stop_profile", {})

    async def close(self) -> None:
        """Let go of the threads; the server runs on."""
        self._threads.shutdown(wait=False)
