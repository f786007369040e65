"""What of the configuration is about the model, checked, and how it reaches the controller's process."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from supervisor.config import ENVIRONMENT, OpinionSettings, load
from supervisor.errors import ConfigError

KEYS = {key: variable for key, variable in ENVIRONMENT.items() if key.startswith("opinion.")}


def environment(given: OpinionSettings, cwd: Path) -> dict[str, str]:
    """The variables by which our controller gets these settings; paths absolute. Raises ConfigError."""
    if given.backend == "none":
        return {KEYS["opinion.backend"]: "none"}
    check(given)
    if given.backend == "transformers":
        given = msgspec.structs.replace(given, model=str(cwd / given.model))
    if given.key_file:
        given = msgspec.structs.replace(given, key_file=str(cwd / given.key_file))
    return {variable: str(getattr(given, key.partition(".")[2])) for key, variable in KEYS.items()}


def from_environment(variables: Mapping[str, str]) -> OpinionSettings:
    """What `environment` said. Raises ConfigError."""
    ours = {name: variables[name] for name in KEYS.values() if name in variables}
    return load({}, ours, Path("/nonexistent")).settings.opinion


def check(given: OpinionSettings) -> None:
    """Raises ConfigError, which names the key and what would do."""
    if given.backend == "transformers" and not given.model:
        raise ConfigError("opinion.model: transformers needs the folder of a model")
    if given.backend == "endpoint":
        _check_url(given)


def missing(given: OpinionSettings, cwd: Path) -> str:
    """What is named and not there, in words. It may be there where the controller runs: no reason to end a run."""
    if given.backend == "transformers" and not any((cwd / given.model).glob("*.safetensors")):
        return f"opinion.model = {given.model!r}: this is no folder with *.safetensors in it"
    if given.backend == "endpoint" and given.key_file and not (cwd / given.key_file).is_file():
        return f"opinion.key_file = {given.key_file!r}: there is no such file"
    return ""


def _check_url(given: OpinionSettings) -> None:
    try:
        url = urlsplit(given.url)
        host, _ = url.hostname, url.port
    except ValueError as error:
        raise ConfigError(f"opinion.url cannot be used: {error}") from None
    if url.username or url.password:
        raise ConfigError("opinion.url has a name or password in it: put a key into a file, opinion.key_file")
    if url.scheme not in ("http", "https") or not host or url.query or url.fragment:
        raise ConfigError(f"opinion.url = {given.url!r}: expected something like https://host/v1")
    if not given.model:
        raise ConfigError("opinion.model: which of the endpoint's models?")
    if given.key_file and url.scheme == "http" and not _is_own(host):
        raise ConfigError(f"opinion.url = {given.url!r}: a key (opinion.key_file) is sent over https only")


def _is_own(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
