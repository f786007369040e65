"""Any server that speaks OpenAI's chat completions: asked once, and once more, in the plainest form, where it refuses.

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
from supervisor.blocking import BlockingCalls, timeout
from supervisor.errors import ModelUnavailable
from supervisor.files import open_regular
from supervisor.opinion.client import ModelAnswer, ProcessAnswer
from supervisor.opinion.local_model import stay_small

RESPONSE_BYTES: Final = 256 * 1024
MAX_TOKENS: Final = 4096
"""Some models think aloud first."""
KEY_BYTES: Final = 4096
CPU_S: Final = 20
PLAINER: Final = (400, 404, 415, 422, 501)
"""Answers of servers that do not know `response_format`, or another parameter: asked again with none."""


class _Message(msgspec.Struct, frozen=True):
    content: str | None = None


class _Choice(msgspec.Struct, frozen=True):
    message: _Message = _Message()


class _Completion(msgspec.Struct, frozen=True):
    choices: tuple[_Choice, ...] = ()


class _Refused(Exception):
    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status = status


class EndpointClient:
    """Asks `model` at `url` (`https://host/v1`), with the key in `key_file` where there is one."""

    def __init__(self, url: str, model: str, key_file: str, timeout_s: float) -> None:
        self._url = f"{url.rstrip('/')}/chat/completions"
        self._model = model
        self._key_file = key_file
        self._timeout_s = timeout_s
        self._files = BlockingCalls("opinion key")

    async def ask(self, question: Question) -> ModelAnswer:
        try:
            async with timeout(self._timeout_s):
                return await self._ask(question)
        except asyncio.TimeoutError:
            raise ModelUnavailable(f"no answer within {self._timeout_s:.0f} s") from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise ModelUnavailable(
                f"the endpoint cannot be asked: {clean_line(str(error) or type(error).__name__)}"
            ) from None

    async def _ask(self, question: Question) -> ModelAnswer:
        key = await self._key()
        headers = {"Accept": "application/json", "Accept-Encoding": "identity"}
        headers |= {"Authorization": f"Bearer {key}"} if key else {}
        async with aiohttp.ClientSession(
            headers=headers,
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            connector=aiohttp.TCPConnector(force_close=True),  # who refuses may hang up without a word: asked anew
            timeout=aiohttp.ClientTimeout(total=self._timeout_s),
        ) as session:
            try:
                try:
                    text = await self._post(session, question, with_schema=True)
                except _Refused as refused:
                    if refused.status not in PLAINER:
                        raise
                    text = await self._post(session, question, with_schema=False)
            except _Refused as refused:
                why = str(refused).replace(key, HIDDEN) if key else str(refused)
                raise ModelUnavailable(f"the endpoint answers {refused.status}: {why or 'without a reason'}") from None
        return ModelAnswer(text.replace(key, HIDDEN) if key else text, len(question.lines), self._model)

    async def _key(self) -> str:
        """Raises ModelUnavailable."""
        if not self._key_file:
            return ""

        def read() -> str:
            with open(open_regular(Path(self._key_file)), "rb") as file:
                return file.read(KEY_BYTES).decode("ascii", errors="replace").strip()

        try:
            key = await self._files.run(read, 5.0)
        except OSError as error:
            raise ModelUnavailable(f"the key cannot be read from {self._key_file}: {error.strerror}") from None
        if not key or not key.isascii() or not key.isprintable() or " " in key:
            raise ModelUnavailable(f"{self._key_file} holds no key")
        return key

    async def _post(self, session: aiohttp.ClientSession, question: Question, *, with_schema: bool) -> str:
        """Raises _Refused and ModelUnavailable."""
        body: dict[str, Any] = {
            "model": self._model,
            "messages": [
                {"role": "system", "content": question.system},
                {"role": "user", "content": llm.prompt(question)},
            ],
        }
        if with_schema:
            form = {"name": "opinion", "strict": True, "schema": llm.schema(question)}
            body["response_format"] = {"type": "json_schema", "json_schema": form}
            body |= {"temperature": 0, "max_tokens": MAX_TOKENS, "stream": False}
        headers = {"Content-Type": "application/json"}
        data = msgspec.json.encode(body)
        async with session.post(self._url, data=data, headers=headers, allow_redirects=False) as response:
            content = await _bounded(response)
            if response.status != 200:
                raise _Refused(response.status, clean_line(content[:600].decode(errors="replace"), 150))
        return _text(content)


async def _bounded(response: aiohttp.ClientResponse) -> bytes:
    content = b""
    async for chunk in response.content.iter_any():
        content += chunk
        if len(content) > RESPONSE_BYTES:
            raise ModelUnavailable("the endpoint's answer is too long")
    return content


def _text(content: bytes) -> str:
    try:
        found = msgspec.json.decode(content, type=_Completion)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        raise ModelUnavailable("the endpoint's answer is no chat completion") from None
    text = found.choices[0].message.content if found.choices else None
    if not text:
        raise ModelUnavailable("the endpoint's answer is empty")
    return text


# ----- the process -----


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """What is asked on stdin."""

    url: str
    model: str
    key_file: str
    timeout_s: float
    question: Question
    parent: int = 0


def main() -> int:
    request = msgspec.json.decode(sys.stdin.buffer.read(), type=Request)
    stay_small(request.parent)
    # A server that sends for ever keeps a core busy until the deadline, but not for longer than this.
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S))
    try:
        exchange = EndpointClient(request.url, request.model, request.key_file, request.timeout_s)
        answer = asyncio.run(exchange.ask(request.question))
    except ModelUnavailable as error:
        reply = ProcessAnswer(problem=str(error))
    else:
        reply = ProcessAnswer(answer=answer.text, lines=answer.lines)
    sys.stdout.buffer.write(msgspec.json.encode(reply))
    sys.stdout.buffer.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
