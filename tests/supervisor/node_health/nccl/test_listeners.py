"""The real kernel's answer."""

from __future__ import annotations

import os
import socket

import pytest

from supervisor.node_health.network import listeners


@pytest.mark.parametrize(("family", "host"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")])
def test_who_listens_is_told_with_address_and_user(family: int, host: str) -> None:
    with socket.socket(family) as server:
        try:
            server.bind((host, 0))
        except OSError:
            pytest.skip("no such address here")
        port = server.getsockname()[1]
        try:
            assert listeners.listener(port) is None
        except OSError:
            pytest.skip("this kernel does not tell")
        server.listen()
        assert listeners.listener(port) == (host, os.getuid())
        with socket.create_connection((host, port)):
            assert listeners.listener(port) == (host, os.getuid())
    assert listeners.listener(port) is None
