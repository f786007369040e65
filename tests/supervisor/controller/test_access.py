"""Rights below the owner's, at a real port: tokens of a role, users whom munge proves, and what is refused."""

from __future__ import annotations

import asyncio
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest

from diagnosis.incident import RULE_PREFIX
from supervisor.controller import access
from supervisor.controller.client import ControllerClient
from supervisor.controller.loop import READERS_AT_ONCE
from supervisor.errors import CommandDenied, UnbrokenError
from supervisor.messages import CommandRequest, OperatorCommand
from supervisor.wire import authentication
from supervisor.wire.access import MUNGE_HEADER, Role, derived_token, job_mark, munge_payload
from supervisor.wire.authentication import CHALLENGE_HEADER, CHALLENGE_PATH, new_nonce

STATUS = "/v1/status"


def grant(job_dir: Path, role: Role, number: int = 1, **more: Any) -> str:
    """The token."""
    made = access.Grant(id=f"{number:08x}", role=role, **more)
    access.add_grant(job_dir, made)
    return derived_token("secret", role, made.id)


async def get(address: str, token: str, path: str = STATUS) -> int:
    """The status of HTTP."""
    try:
        await asyncio.to_thread(ControllerClient(address, token).get, path)
    except CommandDenied as error:
        return error.status
    return 200


async def give(address: str, token: str, **command: Any) -> int:
    asked = CommandRequest(**{"command": "restart", "by": "me", **command})
    try:
        await asyncio.to_thread(ControllerClient(address, token).command, asked)
    except CommandDenied as error:
        return error.status
    return 200


def test_each_role_may_what_its_row_says(rig: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))  # no munge
    tokens = {role: grant(rig.job_dir, role, number) for number, role in enumerate(("read", "operate", "alerts"))}
    of_user = grant(rig.job_dir, "read", 9, uid=5)

    async def scenario() -> None:
        async with rig.controller() as running:
            assert await get(running.address, tokens["read"]) == 200
            assert await get(running.address, tokens["operate"]) == 200
            assert await get(running.address, tokens["alerts"]) == 403
            assert await get(running.address, of_user) == 403, "a user's right is no token"
            assert await give(running.address, tokens["read"]) == 403
            assert await give(running.address, tokens["alerts"]) == 403
            assert rig.journalled(OperatorCommand) == []
            assert await give(running.address, tokens["operate"], command="approve", argument=f"{RULE_PREFIX}x") == 403
            assert await give(running.address, tokens["operate"]) == 200
            assert await give(running.address, "secret", command="pause") == 200

    rig.go(scenario())
    first, second = rig.journalled(OperatorCommand)
    assert (first.role, first.uid) == ("operate", None)
    assert "operate token 00000001" in first.by
    assert (second.role, second.by) == ("", "holder of the token at 127.0.0.1, says me"), "the owner's, as ever"


def test_a_withdrawn_or_foreign_token_is_refused_and_the_run_goes_on(rig: Any) -> None:
    token = grant(rig.job_dir, "admin", name="ann")

    async def scenario() -> None:
        async with rig.controller() as running, rig.agent(running.address) as one:
            await rig.until(lambda: one.newest)
            assert await get(running.address, token) == 200
            assert access.withdraw_grant(rig.job_dir, "00000001")
            assert not access.withdraw_grant(rig.job_dir, "00000001")
            await rig.until(lambda: access.read_grants(rig.job_dir) == {})
            while await get(running.address, token) == 200:
                await asyncio.sleep(0.05)
            assert await get(running.address, derived_token("secret", "admin", "000000ff")) == 403, "never granted"
            grant(rig.job_dir, "read", 2)
            while await get(running.address, derived_token("secret", "read", "00000002")) != 200:
                await asyncio.sleep(0.05)
            assert await get(running.address, derived_token("secret", "admin", "00000002")) == 401, "of another role"
            assert await get(running.address, derived_token("another", "read", "00000002")) == 401
            one.beat(attempt=1)
            told = len(one.told)
            await rig.until(lambda: len(one.told) > told)
            assert one.link.connections == 1
            assert await get(running.address, "secret") == 200

    rig.go(scenario())


def test_no_other_token_makes_an_agent(rig: Any) -> None:
    token = grant(rig.job_dir, "admin")

    async def scenario() -> None:
        async with rig.controller() as running:
            assert await get(running.address, token, "/v1/agent") == 426
            async with aiohttp.ClientSession() as client:
                answer = await client.get(f"{running.address}{STATUS}", headers={"Authorization": f"Bearer {token}"})
                assert answer.status == 401, "a token that is sent as it is proves nothing"

    rig.go(scenario())


def test_grants_that_others_could_have_made_do_not_count(rig: Any) -> None:
    token = grant(rig.job_dir, "read")
    assert ((rig.job_dir / "access").stat().st_mode & 0o777, *access.read_grants(rig.job_dir)) == (0o700, "00000001")
    assert (rig.job_dir / "access" / "00000001.json").stat().st_mode & 0o777 == 0o600
    for name in ("junk.json", "00000002.txt", "00000003.json"):
        (rig.job_dir / "access" / name).write_text("{}")
    assert list(access.read_grants(rig.job_dir)) == ["00000001"]
    (rig.job_dir / "access").chmod(0o777)

    async def scenario() -> None:
        async with rig.controller() as running:
            assert await get(running.address, token) == 403
            assert await get(running.address, "secret") == 200, "the owner's needs no file"

    rig.go(scenario())


def test_grants_that_were_read_before_a_withdrawal_do_not_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system that hangs for a while: who asks later does not get what was read before."""
    answers, begun, now = [{"00000001": access.Grant(id="00000001", role="read")}, {}], threading.Event(), 100.0
    goes_on = threading.Event()

    def slow(_: Path) -> dict[str, access.Grant]:
        found = answers.pop(0)
        begun.set()
        assert goes_on.wait(60)
        return found

    monkeypatch.setattr(access, "read_grants", slow)
    monkeypatch.setattr(access, "time", SimpleNamespace(monotonic=lambda: now))

    async def scenario() -> None:
        nonlocal now
        reader = access.GrantReader(tmp_path)
        first = asyncio.create_task(reader.now())
        assert await asyncio.to_thread(begun.wait, 60)
        now += 1.5
        second = asyncio.create_task(reader.now())
        await asyncio.sleep(0)
        goes_on.set()
        assert list(await first) == ["00000001"]
        assert list(await second) == []

    asyncio.run(scenario())


def test_many_who_look_are_served_some_at_a_time_and_a_command_does_not_wait_for_them(
    rig: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    token, busy, most, goes_on = grant(rig.job_dir, "read"), [0], [0], threading.Event()

    def slow(_: Path, command: OperatorCommand) -> dict[str, Any]:
        if command.command == "pause":
            busy[0] += 1
            most[0] = max(most[0], busy[0])
            assert goes_on.wait(60)
            busy[0] -= 1
        return {"schema": 1, "would": "", "refused": False, "interrupts": False, "drains": []}

    monkeypatch.setattr("supervisor.controller.report.dry_run", slow)

    async def scenario() -> None:
        async with rig.controller() as running:
            asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(32))
            looks = [asyncio.create_task(give(running.address, token, command="pause", dry_run=True)) for _ in range(6)]
            await rig.until(lambda: busy[0] == READERS_AT_ONCE)
            assert await give(running.address, "secret", confirm="if_it_interrupts") == 200
            goes_on.set()
            assert {*await asyncio.gather(*looks)} == {200}

    rig.go(scenario())
    assert most[0] == READERS_AT_ONCE


# ----- munge -----


class MungeClient(ControllerClient):
    """Of a user without a token, who has munge vouch for him."""

    def __init__(self, address: str, owner: int, job: str = "") -> None:
        super().__init__(address, "")
        self._owner, self._job = owner, job or job_mark("secret")


async def get_by_munge(address: str, owner: int, job: str = "") -> int:
    try:
        await asyncio.to_thread(MungeClient(address, owner, job).get, STATUS)
    except CommandDenied as error:
        return error.status
    return 200


def as_user(programs: Path, uid: int) -> None:
    """From now on munge vouches for this user."""
    script = programs / "munge"
    line = script.read_text().replace(' "$@"', f' --uid={uid} "$@"')
    script.write_text(line)


def test_munge_lets_the_owner_in_and_others_as_granted(rig: Any, munged: Path) -> None:
    async def scenario() -> None:
        async with rig.controller() as running:
            assert await get_by_munge(running.address, os.geteuid()) == 200
            assert await get_by_munge(running.address, os.geteuid(), job_mark("another")) == 403, "his other job's"
            asked = CommandRequest(command="restart", by="me")
            told = await asyncio.to_thread(MungeClient(running.address, os.geteuid()).command, asked)
            assert told["ok"]
            as_user(munged, 12345)
            assert await get_by_munge(running.address, os.geteuid()) == 403, "nobody has given this user a right"
            grant(rig.job_dir, "read", 1, uid=54321)
            grant(rig.job_dir, "operate", 2, uid=12345)
            grant(rig.job_dir, "read", 3, anybody=True)
            while await get_by_munge(running.address, os.geteuid()) == 403:
                await asyncio.sleep(0.05)
            asked = CommandRequest(command="pause", by="root")
            await asyncio.to_thread(MungeClient(running.address, os.geteuid()).command, asked)

    rig.go(scenario())
    first, second = rig.journalled(OperatorCommand)
    assert (first.uid, first.role) == (os.geteuid(), "admin")
    assert (second.uid, second.role, second.by) == (12345, "operate", "uid 12345, operate by munge")


def test_one_user_does_not_take_all_challenges(rig: Any, munged: Path) -> None:
    async def challenge(running: Any) -> None:
        client = MungeClient(running.address, os.geteuid())
        with client._connected(30.0) as connection:
            await asyncio.to_thread(client._challenge, connection)

    async def scenario() -> None:
        async with rig.controller() as running:
            grant(rig.job_dir, "read", 1, anybody=True)
            as_user(munged, 12345)
            for _ in range(access.OF_ONE_USER):
                await challenge(running)
            assert await get_by_munge(running.address, os.geteuid()) == 429
            (munged / "munge").write_text((munged / "munge").read_text().replace("--uid=12345", "--uid=54321"))
            assert await get_by_munge(running.address, os.geteuid()) == 200, "another user comes in"

    rig.go(scenario())


@pytest.mark.usefixtures("munged")
def test_a_credential_that_is_replayed_is_refused(rig: Any) -> None:
    """And one that is for another challenge, or for another reader, or not whole."""

    async def scenario() -> None:
        async with rig.controller() as running, aiohttp.ClientSession() as client:

            async def challenge(nonce: str, credential: str) -> int:
                headers = {CHALLENGE_HEADER: nonce, MUNGE_HEADER: credential}
                async with client.get(f"{running.address}{CHALLENGE_PATH}", headers=headers) as answer:
                    return answer.status

            nonce = new_nonce()
            payload = munge_payload(job_mark("secret"), nonce, "b" * 64)
            credential = await asyncio.to_thread(authentication.munge_credential, payload, 30.0, os.geteuid())
            assert await challenge(new_nonce(), credential) == 403, "for another challenge"
            assert await challenge(nonce, credential) == 403, "it was used"
            credential = await asyncio.to_thread(authentication.munge_credential, payload, 30.0, os.geteuid())
            assert await challenge(nonce, credential) == 200
            credential = await asyncio.to_thread(authentication.munge_credential, payload, 30.0, 12345)
            assert await challenge(nonce, credential) == 403, "only user 12345 may read it"
            assert await challenge(nonce, "MUNGE:nonsense:") == 403
            assert await challenge(nonce, "x" * 5000) == 403

    rig.go(scenario())


def test_munge_that_hangs_holds_nobody_up(rig: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    programs = tmp_path / "slow"
    programs.mkdir()
    (programs / "unmunge").write_text("#!/bin/sh\nexec sleep 60\n")
    (programs / "unmunge").chmod(0o755)
    (programs / "munge").write_text("#!/bin/sh\necho MUNGE:x:\n")
    (programs / "munge").chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")

    async def scenario() -> None:
        async with rig.controller() as running:
            asked = [asyncio.create_task(get_by_munge(running.address, os.geteuid())) for _ in range(4)]
            assert await get(running.address, "secret") == 200
            assert {*await asyncio.gather(*asked)} <= {403, 429}

    rig.go(scenario())


def test_without_munge_and_token_it_is_said(rig: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))

    async def scenario() -> None:
        async with rig.controller() as running:
            with pytest.raises(UnbrokenError, match="munge"):
                await asyncio.to_thread(MungeClient(running.address, 0).get, STATUS)

    rig.go(scenario())
