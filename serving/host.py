"""An engine in a process of its own: `python -m serving.host FD` behind one end of a socket.

Lines of JSON go both ways. The first says what to start; then each has an `id` and an `op`, and is
answered under the same `id`, requests while others are answered. Times are taken here, beside the
engine, so that the way to the asking process is not measured.
"""

from __future__ import annotations

import asyncio
import json
import socket
import sys
from collections.abc import Awaitable
from dataclasses import asdict
from typing import Any, Protocol

from serving.launch_spec import Launch, Setting
from serving.measure import Answer, Ask

LINE_LIMIT_BYTES = 2**25
"""Longest line; a prompt of a hundred thousand tokens takes less than a megabyte."""


class Engine(Protocol):
    """What is asked of an engine; see `serving.offline.OfflineEngine`."""

    async def ask(self, ask: Ask) -> Answer:
        """One answer."""

    async def info(self) -> dict[str, Any]:
        """Resolved arguments and state."""

    async def start_profile(self, folder: str) -> None:
        """Begin a trace."""

    async def stop_profile(self) -> None:
        """End it and have it written."""


def launch_to_line(launch: Launch) -> str:
    """A launch as the first line."""
    return json.dumps(
        {
            "profile": launch.profile,
            "arguments": launch.argument_dict(),
            "environment": launch.environment_dict(),
        }
    )


def launch_from_line(line: str) -> Launch:
    """The inverse of `launch_to_line`; reasons are left out."""
    found = json.loads(line)

    def settings(values: dict[str, Any]) -> tuple[Setting, ...]:
        return tuple(
            Setting(k, tuple(v) if isinstance(v, list) else v, "") for k, v in values.items()
        )

    return Launch(found["profile"], settings(found["arguments"]), settings(found["environment"]))


async def serve(
    engine: Engine, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, started: float
) -> None:
    """Answer until the asking process says stop or is gone."""
    tasks: set[asyncio.Task[None]] = set()

    def send(message: dict[str, Any]) -> None:
        writer.write(json.dumps(message).encode() + b"\n")

    async def answer(number: int, work: Awaitable[Any]) -> None:
        try:
            send({"id": number, "result": await work})
        except Exception as error:
            send({"id": number, "error": f"{type(error).__name__}: {error}"})
        await writer.drain()

    send({"id": 0, "result": {"start_seconds": started}})
    while line := await reader.readline():
        message = json.loads(line)
        if message["op"] == "stop":
            break
        task = asyncio.ensure_future(answer(message["id"], _work(engine, message)))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
    for task in tasks:
        task.cancel()


async def _work(engine: Engine, message: dict[str, Any]) -> Any:
    if message["op"] == "ask":
        values = message["ask"]
        for name in ("token_ids", "stop_token_ids"):
            values[name] = tuple(values[name])
        return asdict(await engine.ask(Ask(**values)))
    if message["op"] == "info":
        # Resolved arguments hold objects too; only what JSON can say is of use outside.
        return json.loads(json.dumps(await engine.info(), default=str))
    if message["op"] == "start_profile":
        return await engine.start_profile(message["folder"])
    if message["op"] == "stop_profile":
        return await engine.stop_profile()
    raise ValueError(f"op={message['op']!r} is not known to serving.host")


def answer_from_result(result: dict[str, Any]) -> Answer:
    """An answer as it came over the line."""
    result["token_ids"] = tuple(result["token_ids"])
    result["arrivals"] = tuple((when, count) for when, count in result["arrivals"])
    return Answer(**result)


def main() -> int:
    """Start the engine that the first line describes, and serve it."""
    from serving.offline import OfflineEngine

    connection = socket.socket(fileno=int(sys.argv[1]))
    line = bytearray()
    while not line.endswith(b"\n"):
        piece = connection.recv(1)
        if not piece:
            return 1
        line += piece
    with OfflineEngine(launch_from_line(line.decode())) as engine:

        async def run() -> None:
            reader, writer = await asyncio.open_connection(sock=connection, limit=LINE_LIMIT_BYTES)
            await serve(engine, reader, writer, engine.start_seconds)

        engine.run(run())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
