"""The agent's socket, where the launcher's rendezvous handler asks what to do (docs/node-files.md, "Agent socket").

A launcher has at most one question open: `join` (it waits in rendezvous) or `wait` (its workers run). The question is
kept until the agent answers it. A launcher asks again when the agent was restarted, so nothing is lost.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec

from supervisor.agent.state import AgentState
from supervisor.messages import StoreOffer
from supervisor.wire.peers import own_users, peer_uid, user_name


class LauncherSocket:
    """Keeps `state.offer` and `state.watching`."""

    def __init__(self, state: AgentState, release_gpus: Callable[[float, str], Awaitable[dict[str, Any]]]) -> None:
        """`release_gpus`: lets go of the GPUs for so many seconds, at this user's request.

        (`unbroken check --release-gpus`)
        """
        self._state = state
        self._release_gpus = release_gpus
        self._question: tuple[str, asyncio.Future[dict[str, Any]]] | None = None

    async def serve(self, path: Path) -> asyncio.Server:
        path.unlink(missing_ok=True)
        server = await asyncio.start_unix_server(self._talk, path=str(path), limit=1 << 16)
        os.chmod(path, 0o600)
        return server

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        uid = peer_uid(writer.get_extra_info("socket"))
        if uid is None or uid not in own_users():
            writer.close()
            return
        answer: asyncio.Future[dict[str, Any]] | None = None
        line_to_come = asyncio.ensure_future(reader.readline())
        try:
            while line := await line_to_come:
                answer = self._open(msgspec.json.decode(line, type=dict[str, Any]), uid)
                line_to_come = asyncio.ensure_future(reader.readline())
                either: set[asyncio.Future[Any]] = {answer, line_to_come}
                await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
                if answer.done():  # else it hung up or asks again, and the old question is void
                    writer.write(msgspec.json.encode(answer.result()) + b"\n")
                    await writer.drain()
        except (OSError, ValueError, KeyError, TypeError, msgspec.DecodeError):
            pass  # the client is gone, or what it sends cannot be read
        finally:
            line_to_come.cancel()
            self._close(answer)
            writer.close()

    def _open(self, request: dict[str, Any], uid: int) -> asyncio.Future[dict[str, Any]]:
        op = str(request["op"])
        if op == "release_gpus":  # an operator asks, not a launcher
            return asyncio.ensure_future(self._release_gpus(float(request["seconds"]), user_name(uid)))
        answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        if op == "join":
            self._state.offer = StoreOffer(
                host=str(request.get("store_host", "")),
                port=int(request["store_port"]),
                local_world_size=int(request["local_world_size"]),
            )
            self._state.watching = None
        elif op == "wait":
            self._state.watching = int(request["attempt"])
            self._state.offer = None
        else:
            raise ValueError(f"unknown request {op!r}")
        self._question = (op, answer)
        self._state.wakeup.set()
        return answer

    def _close(self, answer: asyncio.Future[dict[str, Any]] | None) -> None:
        if self._question is not None and self._question[1] is answer:
            self._clear()
            self._state.wakeup.set()

    def _clear(self) -> None:
        self._question = None
        self._state.offer = None
        self._state.watching = None

    def _answer(self, op: str, body: dict[str, Any]) -> bool:
        if self._question is None or self._question[0] != op or self._question[1].done():
            return False
        answer = self._question[1]
        self._clear()
        answer.set_result(body)
        return True

    def join(self, *, attempt: int, rank: int, nodes: int, store_host: str, store_port: int) -> bool:
        """Let the waiting launcher start the workers of `attempt`; False if none waits."""
        return self._answer(
            "join",
            {"attempt": attempt, "rank": rank, "nodes": nodes, "store_host": store_host, "store_port": store_port},
        )

    def leave(self) -> bool:
        """Let the launcher that waits in rendezvous end, with code 0."""
        return self._answer("join", {"leave": True})

    def release(self, answer: str) -> bool:
        """Unblock the launcher that watches its workers: `look` at them, or `restart` them."""
        return self._answer("wait", {"order": answer})
