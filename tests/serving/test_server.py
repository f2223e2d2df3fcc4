"""Servers at an address and in a process of their own, each with something that stands for one."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from fake_server import FakeServer
from fake_trace import dspark_steps

from serving import facts, session
from serving.bench import Workload
from serving.host import launch_from_line, launch_to_line
from serving.launch_spec import Launch, Setting
from serving.measure import Answer, Ask, answer_all, record_stream
from serving.processes import descendants
from serving.server import EngineProcess, HttpServer, ServerError, Turns
from serving.session import check_hooks
from serving.workload import Prompt

LAUNCH = Launch("plain", (Setting("tp_size", 1, ""), Setting("bs", (1, 2), "")))
META = {"completion_tokens": 1, "finish_reason": None}
END = {"completion_tokens": 3, "finish_reason": {"type": "length", "length": 3}}
HOST = """
import asyncio, json, socket, sys
from serving.host import launch_from_line, serve
from serving.measure import Answer

class Engine:
    async def ask(self, ask):
        if ask.max_new_tokens == 13:
            raise ValueError("unlucky")
        if ask.max_new_tokens == 99:
            print("the last words", flush=True)
            sys.exit(3)
        await asyncio.sleep(0.01 * ask.token_ids[0])
        return Answer({"completion_tokens": 2}, 0.0, 1.0, 2.0, ask.token_ids, ((1.0, 1), (2.0, 2)))

    async def info(self):
        return {"tp_size": self.launch.argument_dict()["tp_size"], "odd": object()}

    async def start_profile(self, folder):
        self.folder = folder

    async def stop_profile(self):
        open(self.folder, "w").write("traced")

async def main():
    connection = socket.socket(fileno=int(sys.argv[1]))
    reader, writer = await asyncio.open_connection(sock=connection)
    engine = Engine()
    engine.launch = launch_from_line((await reader.readline()).decode())
    await serve(engine, reader, writer, 1.5)

print("a word before", flush=True)
asyncio.run(main())
"""


PARENT = (
    "import subprocess\nsubprocess.Popen(['sleep', '600'])\n"
    + HOST
    + "from serving.processes import kill_descendants\nkill_descendants()\n"
)
"""With a process that stands for a scheduler."""


def state(pid: int) -> str:
    """As the kernel says, empty for a process that is gone or nobody has waited for."""
    try:
        found = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""
    return "" if found in "ZX" else found


def test_a_launch_travels_whole() -> None:
    there = launch_from_line(launch_to_line(LAUNCH.plus((), [Setting("X", True, "why")])))
    assert there.argument_dict() == {"tp_size": 1, "bs": [1, 2]}
    assert there.environment_dict() == {"X": "1"}


def engine(tmp_path: Path, program: str = HOST) -> Any:
    command = (sys.executable, "-c", program)
    return EngineProcess.start(LAUNCH, tmp_path / "log", command=command)


def test_an_engine_in_a_process_answers_several_at_once(tmp_path: Path) -> None:
    async def run() -> None:
        server = await engine(tmp_path)
        try:
            assert server.start_seconds == 1.5
            slow, quick = await asyncio.gather(server.ask(Ask((5, 1))), server.ask(Ask((0, 2))))
            assert slow.token_ids == (5, 1) and quick.token_ids == (0, 2)
            assert quick.arrivals == ((1.0, 1), (2.0, 2))
            info = await server.info()
            assert info["tp_size"] == 1 and isinstance(info["odd"], str)
            await server.start_profile(str(tmp_path / "trace"))
            await server.stop_profile()
            assert (tmp_path / "trace").read_text() == "traced"
            with pytest.raises(ServerError, match="unlucky"):
                await server.ask(Ask((0,), max_new_tokens=13))
            # One refusal leaves the engine answering.
            assert (await server.ask(Ask((0, 3)))).token_ids == (0, 3)
        finally:
            await server.close()
        assert server._process.poll() is not None

    asyncio.run(run())


def test_engines_that_share_a_machine_rest_until_they_are_asked(tmp_path: Path) -> None:

    def rests(server: EngineProcess) -> bool:
        (scheduler,) = descendants(server._process.pid)
        return state(scheduler) == "T"

    async def run() -> None:
        both = [await engine(tmp_path / str(n), PARENT) for n in range(2)]
        turns = Turns()
        first, second = (turns.add(server) for server in both)
        try:
            assert [rests(server) for server in both] == [True, True]
            assert (await first.ask(Ask((0, 3)))).token_ids == (0, 3)
            assert [rests(server) for server in both] == [False, True]
            assert (await second.info())["tp_size"] == 1
            assert [rests(server) for server in both] == [True, False]
            slow = asyncio.ensure_future(second.ask(Ask((20,))))
            await asyncio.sleep(0)
            with pytest.raises(ServerError, match="two engines were asked at the same time"):
                await first.info()
            # Of one engine several things may be asked.
            await second.start_profile(str(tmp_path / "trace"))
            await second.stop_profile()
            assert (await slow).token_ids == (20,)
            begun = time.monotonic()
        finally:
            for server in both:
                await server.close()
        # One that rests ends as soon as it is told to.
        assert time.monotonic() - begun < 30
        assert all(server._process.poll() is not None for server in both)

    asyncio.run(run())


def test_an_engine_that_rests_ends_with_whoever_started_it(tmp_path: Path) -> None:
    script = tmp_path / "asks.py"
    script.write_text(
        f"""
import asyncio, sys, time
sys.path.insert(0, {str(Path(__file__).parent)!r})
from pathlib import Path
from test_server import PARENT, engine
from serving.processes import descendants
from serving.server import Turns

async def run():
    server = await engine(Path({str(tmp_path)!r}), PARENT)
    Turns().add(server)
    print(server._process.pid, *descendants(server._process.pid), flush=True)
    time.sleep(600)

asyncio.run(run())
"""
    )
    asks = subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True)
    assert asks.stdout is not None
    pids = [int(text) for text in asks.stdout.readline().split()]
    assert len(pids) == 2 and state(pids[1]) == "T"
    asks.kill()
    asks.wait()
    deadline = time.monotonic() + 30
    while any(map(state, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(state, pids))


def test_what_a_dead_engine_has_left_resting_goes_on(tmp_path: Path) -> None:
    # In a session of its own, it is not ended with the engine's.
    program = "import subprocess\nsubprocess.Popen(['sleep', '600'], start_new_session=True)\n"

    async def run() -> None:
        server = await engine(tmp_path, program + HOST)
        (helper,) = descendants(server._process.pid)
        server.pause()
        try:
            os.kill(server._process.pid, signal.SIGKILL)
            await server.close()
            assert state(helper) == "S"
        finally:
            os.kill(helper, signal.SIGKILL)

    asyncio.run(run())


def test_what_is_asked_beside_a_failure_is_not_waited_for(tmp_path: Path) -> None:
    async def run() -> None:
        both = [await engine(tmp_path / str(n)) for n in range(2)]
        turns = Turns()
        first, second = (turns.add(server) for server in both)
        try:
            asks = [Ask((60, 1)), Ask((0,), max_new_tokens=13), Ask((60, 2))]
            with pytest.raises(ServerError, match="unlucky"):
                await answer_all(first.ask, asks, 2)
            assert (await second.ask(Ask((0, 3)))).token_ids == (0, 3)
        finally:
            for server in both:
                await server.close()

    asyncio.run(run())


def test_an_engine_that_dies_is_named_with_its_last_words(tmp_path: Path) -> None:
    async def run() -> None:
        server = await engine(tmp_path)
        try:
            with pytest.raises(ServerError, match="the last words"):
                await server.ask(Ask((0,), max_new_tokens=99))
            with pytest.raises(ServerError, match=r"the engine (has )?ended"):
                await server.ask(Ask((0,)))
        finally:
            await server.close()

    asyncio.run(run())


def test_an_engine_that_does_not_start_is_named(tmp_path: Path) -> None:
    async def run() -> None:
        with pytest.raises(ServerError, match="no such GPU"):
            await engine(tmp_path, "raise SystemExit('no such GPU')")

    asyncio.run(run())


class Handler(BaseHTTPRequestHandler):
    """Streams one answer, or fails where it is told to."""

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._reply(json.dumps({"speculative_algorithm": "DSPARK"}).encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/start_profile":
            assert body["output_dir"] == "/traces"
            return self._reply(b"")
        if self.path == "/stop_profile":
            return self._reply(b"")
        ids = body["input_ids"]
        if ids == [13]:
            return self.send_error(500, "unlucky")
        parts = [{"meta_info": META, "output_ids": ids[:1]}]
        parts.append({"meta_info": END, "output_ids": [*ids[:1], 8, 9]})
        if ids == [14]:
            parts[1] = {"error": {"message": "aborted"}}
        lines = "".join(f"data: {json.dumps(p)}\n\n" for p in parts) + "data: [DONE]\n\n"
        self._reply(lines.encode())

    def _reply(self, data: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@pytest.fixture
def url() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    server.server_close()
    thread.join()


def test_a_server_at_an_address(url: str) -> None:
    async def run() -> None:
        server = HttpServer(url)
        answer = await server.ask(Ask((7,), max_new_tokens=3))
        assert answer.token_ids == (7, 8, 9)
        assert [n for _, n in answer.arrivals] == [1, 3]
        assert answer.asked <= answer.first <= answer.last
        assert (await server.info())["speculative_algorithm"] == "DSPARK"
        await server.start_profile("/traces")
        await server.stop_profile()
        for ids, text in (((13,), "500"), ((14,), "aborted")):
            with pytest.raises(ServerError, match=text):
                await server.ask(Ask(ids))
        await server.close()
        gone = HttpServer("http://127.0.0.1:1")
        with pytest.raises(ServerError, match="failed"):
            await gone.info()

    asyncio.run(run())


def test_parts_that_hold_only_what_is_new_are_put_together() -> None:
    async def stream(*parts: dict[str, Any]):  # type: ignore[no-untyped-def]
        for part in parts:
            yield part

    async def run() -> None:
        first = {"meta_info": META, "output_ids": [1]}
        last = {"meta_info": END, "output_ids": [2, 3]}
        assert (await record_stream(stream(first, last))).token_ids == (1, 2, 3)
        for parts in ((), (first,), ({"meta_info": {**END, "finish_reason": {"type": "abort"}}},)):
            with pytest.raises(ValueError, match="gave a request up"):
                await record_stream(stream(*parts))

    asyncio.run(run())


def test_a_fold_without_its_plugin_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "log"
    log.write_text("ready\n")
    with pytest.raises(ServerError, match="did not load this package's plugin"):
        check_hooks(log, "SPLITSERVE_FOLD", "fold: ")
    log.write_text("ready\n12:00 fold: accept into the verify graph\n")
    check_hooks(log, "SPLITSERVE_FOLD", "fold: ")
    assert "fold: accept" in capsys.readouterr().err


def test_a_trace_is_taken_while_the_answer_is_decoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []

    class Traced(FakeServer):
        async def ask(self, ask: Ask) -> Answer:
            order.append(f"ask {ask.max_new_tokens}")
            answer = await super().ask(ask)
            if ask.max_new_tokens == session.TRACE_TOKENS:
                assert ask.ignore_eos
                await asyncio.sleep(0.2)
                order.append("answered")
            return answer

        async def start_profile(self, folder: str) -> None:
            order.append("start")
            self.path = Path(folder) / "1-TP-0.trace.json"

        async def stop_profile(self) -> None:
            order.append("stop")
            self.path.write_text(json.dumps({"traceEvents": dspark_steps()}))

    monkeypatch.setattr(session, "SETTLE_SECONDS", -0.45)
    monkeypatch.setattr(session, "TRACE_SECONDS", 0.01)
    work = Workload((Prompt("a", (1,)), Prompt("a", (2,))), 256)
    traces = asyncio.run(session.traced(Traced(), work, tmp_path / "t"))
    assert order == ["ask 64", "ask 2048", "start", "stop", "answered"]
    census, facts = session.summarize_traces(traces)
    assert census.step_ms == pytest.approx(facts.step_ms)


def test_the_machines_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    def answers(*texts: str | None):  # type: ignore[no-untyped-def]
        queue = list(texts)

        def run(query: Any, **_: Any) -> Any:
            text = queue.pop(0)
            if text is None:
                raise FileNotFoundError(query[0])
            return subprocess.CompletedProcess(query, 0, text, "")

        monkeypatch.setattr(facts.subprocess, "run", run)
        return facts.detect_gpu()

    assert answers("9.0\n9.0\n") == (facts.Gpu.HOPPER, 2)
    assert answers(None, "10.0\n") == (facts.Gpu.BLACKWELL, 1)
    assert answers(None, "") == (facts.Gpu.CPU, 0)
