"""NCCL's RAS: its protocol against a real server that keeps to it or does not, its reports as NCCL formats them."""

from __future__ import annotations

import socket
import time
from pathlib import Path
from typing import Any

import pytest

from supervisor.node_health.contract import Place
from supervisor.node_health.network import ras
from supervisor.node_health.network.ras import Peer, local_pids, parse

HEAD = """NCCL version 2.27.3 compiled with CUDA 12.9
CUDA runtime version 12090, driver version 12090

Job summary
===========

  Nodes  Processes         GPUs  Processes     GPUs
(total)   per node  per process    (total)  (total)
      4          8            1         32       32

Communicators... (0.00s)
=============

Group     Comms     Nodes     Ranks     Ranks     Ranks    Status  Errors
    #  in group  per comm  per node  per comm  in group
"""
GOOD = HEAD + "    0         8         4         1         4        32   RUNNING      OK\n"
NOTHING_WRONG = "\nErrors\n======\n\nWarnings\n========\n\n"
BAD = """    0         1         4       7-8        32        31   RUNNING  INCOMPLETE,ERROR,MISMATCH

Errors
======

INCOMPLETE
  Missing communicator data from 2 job processes
  Process 3487984 on node 172.16.64.213 managing GPU 5
  Process 3487985 on node 172.16.64.213 managing GPU 6 (NVML 2)

DEAD
  1 job process is considered dead (unreachable via the RAS network)
  Process 4242 on node fd00::5 managing GPUs 0,1

#0-0 (cf264af53edbe986) INCOMPLETE
  Missing communicator data from 1 rank
  Rank 21 -- GPU 5 managed by process 3487984 on node 172.16.64.213

#0-0 (cf264af53edbe986) ERROR
  Asynchronous error on 1 rank
  Rank 3 reported Remote process error -- GPU 3 managed by process 1483 on node 172.16.64.210

Warnings
========

TIMEOUT
  Encountered 2 communication timeouts while gathering communicator data

#0-0 (cf264af53edbe986) MISMATCH
  Communicator ranks have different status
  Rank 1 has status INIT -- GPU 1 managed by process 1481 on node 172.16.64.210
  Communicator ranks have different AllReduce operation counts
  26 ranks have launched up to operation 6650
  4 ranks have launched up to operation 6649
  Rank 0 -- GPU 0 managed by process 1480 on node 172.16.64.210
  Rank 2 -- GPU 2 managed by process 1482 on node 172.16.64.210
  Rank 7 has launched up to operation 60 -- GPU 7 managed by process 1487 on node 172.16.64.210

  Communicator ranks have different Broadcast operation counts
  30 ranks have launched up to operation 4
  Rank 9 has not launched any operations -- GPU 1 managed by process 99 on node 172.16.64.211

"""


def test_the_protocol(ras_server: Any) -> None:
    ras_server.report = GOOD + NOTHING_WRONG
    answer = ras.ask("127.0.0.1", ras_server.port, 5.0, status=True)
    assert answer == (GOOD + NOTHING_WRONG, 0)
    assert ras_server.heard == ["CLIENT PROTOCOL 2", "TIMEOUT 5", "VERBOSE STATUS"]
    assert ras.ask("127.0.0.1", ras_server.port, 5.0, status=False)[0] == ""


def test_a_version_that_does_not_know_the_timeout_is_asked_all_the_same(ras_server: Any) -> None:
    ras_server.manner, ras_server.report = "old", GOOD
    assert ras.ask("127.0.0.1", ras_server.port, 5.0, status=True)[0] == GOOD


def test_one_stuck_process_of_those_that_share_the_port_is_counted(ras_server: Any) -> None:
    ras_server.manner, ras_server.report = "first silent", GOOD
    assert ras.ask("127.0.0.1", ras_server.port, 5.0, status=True, greeting_s=0.1) == (GOOD, 1)


@pytest.mark.parametrize(
    ("manner", "why"),
    [
        ("silent", "does not answer"),
        ("no report", "its report did not come in time"),
        ("dripping", "its report did not come in time"),
        ("garbage", "does not speak RAS"),
        ("no line", "does not speak RAS"),
        ("closing", "does not speak RAS|reset"),
    ],
)
def test_who_does_not_keep_to_it_costs_no_more_than_the_deadline(ras_server: Any, manner: str, why: str) -> None:
    ras_server.manner = manner
    began = time.monotonic()
    with pytest.raises(ras.NoAnswerError, match=why):
        ras.ask("127.0.0.1", ras_server.port, 0.5, status=True, greeting_s=0.1)
    assert time.monotonic() - began < 20.0


def test_an_endless_report_is_cut(ras_server: Any) -> None:
    ras_server.manner = "endless"
    assert len(ras.ask("127.0.0.1", ras_server.port, 10.0, status=True)[0]) == ras.LIMIT


def test_nobody_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(ras.Refused):
        ras.ask("127.0.0.1", port, 1.0, status=True)


TCP = """  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 00000000:07E8 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 1145 1 0000000096a4e4c8
   1: 0100007F:6D7C 0100007F:99AB 01 00000000:00000000 03:00000025 00000000  1001        0 0 3 00000000babd35c3
   2: 0100007F:6D7C 00000000:0000 0A 00000000:00000000 00:00000000 00000000  1000        0 77 1 0000000096a4e4c8
"""
TCP6 = """  sl  local_address                         remote_address                        st tx_queue rx_queue tr uid
   0: 00000000000000000000000001000000:6D7C 00000000000000000000000000000000:0000 0A 0:0 00:0 00000000  1000 0 5 1
"""


def test_who_listens(tmp_path: Path) -> None:
    assert ras.find_listener(TCP, "", 28028) == ("127.0.0.1", 1000)
    assert ras.find_listener(TCP, "", 2024) == ("127.0.0.1", 0)  # on all addresses
    assert ras.find_listener("", TCP6, 28028) == ("::1", 1000)
    assert ras.find_listener(TCP, TCP6, 4711) is None
    assert ras.find_listener("x\n0: zz:6D7C x 0A a b c 7\n", "\n\n", 28028) is None
    with socket.create_server(("127.0.0.1", 0)) as server:
        live = Place()
        found = ras.find_listener(live.text("proc/net/tcp", 1 << 20) or "", "", server.getsockname()[1])
        assert found is not None
        assert found[0] == "127.0.0.1"
    assert "127.0.0.1" in ras.local_addresses(Place())
    assert ras.local_addresses(Place(root=tmp_path)) == frozenset()


@pytest.mark.parametrize(
    ("address", "port"),
    [("", 28028), ("localhost:4711", 4711), ("[::1]:5", 5), ("10.0.0.1", 28028), ("x:99999", 28028), ("x:-1", 28028)],
)
def test_the_port_of_an_address(address: str, port: int) -> None:
    assert ras.port_of(address) == port


def test_a_report_of_a_sound_job() -> None:
    status = parse(GOOD + NOTHING_WRONG)
    assert (status.version, status.communicators, status.ending) == ("2.27.3", 8, 0)
    assert (status.dead, status.missing, status.timeouts) == (0, 0, 0)
    assert not status.errors


def test_a_report_of_a_job_with_everything_wrong() -> None:
    status = parse(HEAD + BAD)
    assert (status.dead, status.missing, status.timeouts) == (1, 2, 2)
    assert status.peers["DEAD"] == [Peer(4242, "fd00::5")]
    assert [peer.pid for peer in status.peers["INCOMPLETE"]][:2] == [3487984, 3487985]
    assert status.errors == [("Remote process error", Peer(1483, "172.16.64.210", 3))]
    assert local_pids(status.peers["DEAD"], frozenset({"fd00::5"})) == (4242,)
    assert local_pids(status.peers["DEAD"], frozenset({"10.0.0.2"})) == ()


@pytest.mark.parametrize("cut", range(0, len(HEAD + BAD), 97))
def test_a_report_that_is_cut_anywhere_is_read(cut: int) -> None:
    status = parse((HEAD + BAD)[:cut])
    assert status.dead <= 1
    assert parse((HEAD + BAD)[cut:]).missing <= 2


def test_hostile_reports_are_read() -> None:
    assert not parse("\x00\x1b[2J" * 1000).is_report
    status = parse(
        "NCCL version \x1b[31mx\n#0-0 (zz) ERROR\n  Rank 1 reported \x1b[31m\n" + "DEAD\n  99 job process\n" * 9
    )
    assert status.dead == 99
    assert "\x1b" not in repr(status)
