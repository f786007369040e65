"""Any server that speaks OpenAI's chat completions: asked once, and a second time in the plainest form if it refuses.

The server is not trusted: nothing it says is read beyond a limit, no redirect is followed, and its key never shows in
what is told. This runs in a process of its own (`supervisor.opinion.client`): question on stdin, answer on stdout.
"""

from __future__ import annotations

import asyncio
import resource
import sys
from pathlib import Path
from typing import Any, Final

import aiohttp
import msgspec

from diagnosis import llm
from diagnosis.llm import Question
from diagnosis.signals import clean_line
from diagnosis.text import HIDDEN
from supervisor.blocking import timeout
from supervisor.errors import ModelUnavailable
from supervisor.files import open_regular
from supervisor.opinion.client import ProcessAnswer
from supervisor.opinion.local_model import stay_small

RESPONSE_BYTES: Final = 256 * 1024
MAX_TOKENS: Final = 4096
"""Some models think aloud first."""
KEY_BYTES: Final = 4096
CPU_S: Final = 20
MOST_TOKENS: Final = 10_000_000
"""A server may say anything."""
PLAINER: Final = (400, 404, 415, 422, 501)
"""Answers of servers that do not know `response_format`, or another parameter: asked again with none."""


class _Message(msgspec.Struct, frozen=True):
    content: str | None = None


class _Choice(msgspec.Struct, frozen=True):
    message: _Message = _Message()


class _Completion(msgspec.Struct, frozen=True):
    choices: tuple[_Choice, ...] = ()
    usage: Any = None


class _Refused(Exception):
    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status = status


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """What is asked on stdin: `model` at `url` (`https://host/v1`), with the key in `key_file` where there is one."""

    url: str
    model: str
    key_file: str
    timeout_s: float
    question: Question
    parent: int = 0


async def ask(request: Request) -> ProcessAnswer:
    """Raises ModelUnavailable."""
    key = _key(request.key_file) if request.key_file else ""
    headers = {"Accept": "application/json", "Accept-Encoding": "identity", "Content-Type": "application/json"}
    headers |= {"Authorization": f"Bearer {key}"} if key else {}
    try:
        async with (
            timeout(request.timeout_s),
            aiohttp.ClientSession(
                headers=headers,
                cookie_jar=aiohttp.DummyCookieJar(),
                auto_decompress=False,
                connector=aiohttp.TCPConnector(force_close=True),  # who refuses may hang up without a word: asked anew
                timeout=aiohttp.ClientTimeout(total=request.timeout_s),
            ) as session,
        ):
            try:
                reply = await _post(session, request, with_schema=True)
            except _Refused as refused:
                if refused.status not in PLAINER:
                    raise
                reply = await _post(session, request, with_schema=False)
    except _Refused as refused:
        why = str(refused).replace(key, HIDDEN) if key else str(refused)
        raise ModelUnavailable(f"the endpoint answers {refused.status}: {why or 'without a reason'}") from None
    except asyncio.TimeoutError:
        raise ModelUnavailable(f"no answer within {request.timeout_s:.0f} s") from None
    except (aiohttp.ClientError, OSError, ValueError) as error:
        why = clean_line(str(error) or type(error).__name__)
        raise ModelUnavailable(f"the endpoint cannot be asked: {why}") from None
    return msgspec.structs.replace(reply, answer=reply.answer.replace(key, HIDDEN)) if key else reply


def _key(path: str) -> str:
    """Raises ModelUnavailable. A file system that hangs is the end of this process, and of nothing else."""
    try:
        with open(open_regular(Path(path)), "rb") as file:
            key = file.read(KEY_BYTES).decode("ascii", errors="replace").strip()
    except OSError as error:
        raise ModelUnavailable(f"the key cannot be read from {path}: {error.strerror}") from None
    if not key or not key.isascii() or not key.isprintable() or " " in key:
        raise ModelUnavailable(f"{path} does not hold a key")
    return key


async def _post(session: aiohttp.ClientSession, request: Request, *, with_schema: bool) -> ProcessAnswer:
    """Raises _Refused and ModelUnavailable."""
    question = request.question
    body: dict[str, Any] = {
        "model": request.model,
        "messages": [
            {"role": "system", "content": question.system},
            {"role": "user", "content": llm.prompt(question)},
        ],
    }
    if with_schema:
        form = {"name": "opinion", "strict": True, "schema": llm.schema(question)}
        body["response_format"] = {"type": "json_schema", "json_schema": form}
        body |= {"temperature": 0, "max_tokens": MAX_TOKENS, "stream": False}
    url = f"{request.url.rstrip('/')}/chat/completions"
    async with session.post(url, data=msgspec.json.encode(body), allow_redirects=False) as response:
        content = await _bounded(response)
        if response.status != 200:
            raise _Refused(response.status, clean_line(content[:600].decode(errors="replace"), 150))
    return msgspec.structs.replace(_answer(content), lines=len(question.lines))


async def _bounded(response: aiohttp.ClientResponse) -> bytes:
    content = b""
    async for chunk in response.content.iter_any():
        content += chunk
        if len(content) > RESPONSE_BYTES:
            raise ModelUnavailable("the endpoint's answer is too long")
    return content


def _answer(content: bytes) -> ProcessAnswer:
    try:
        found = msgspec.json.decode(content, type=_Completion)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        raise ModelUnavailable("the endpoint's answer is no chat completion") from None
    text = found.choices[0].message.content if found.choices else None
    if not text:
        raise ModelUnavailable("the endpoint's answer is empty")
    read, written = _count(found.usage, "prompt_tokens"), _count(found.usage, "completion_tokens")
    return ProcessAnswer(answer=text, tokens_read=read, tokens_written=written)


def _count(usage: Any, name: str) -> int:
    count = usage.get(name) if isinstance(usage, dict) else None
    return min(max(count, 0), MOST_TOKENS) if type(count) is int else 0


# ----- the process -----


def main() -> int:
    request = msgspec.json.decode(sys.stdin.buffer.read(), type=Request)
    stay_small(request.parent)
    # A server that sends for ever keeps a core busy until the deadline, but not for longer than this.
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S))
    try:
        reply = asyncio.run(ask(request))
    except ModelUnavailable as error:
        reply = ProcessAnswer(problem=str(error))
    sys.stdout.buffer.write(msgspec.json.encode(reply))
    sys.stdout.buffer.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
