"""`unbroken page`: what the browser is given, who is refused, and the page itself in a real Chromium."""

import http.client
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from diagnosis.incident import HangReport
from diagnosis.signals import (
    CollectiveEntry,
    ExitRecord,
    Frame,
    LossAlarm,
    NodeEvidence,
    RankFlight,
    RankOutput,
    RankStack,
)
from supervisor.cli.job_commands import JobHandle
from supervisor.cli.page_server import STREAMS, Feed, JobReader, PageServer, events, pause_s
from supervisor.controller.journal import Entry, open_journal
from supervisor.errors import JobNotFound
from supervisor.messages import (
    AnyEvent,
    ControllerStarted,
    EvidenceArrived,
    HangConfirmed,
    JobDefined,
    JobSpec,
    LauncherReady,
    LossSeen,
    NodeJoined,
    OperatorCommand,
    Progressed,
    RankEnded,
    StoreOffer,
    TimerFired,
    WorkersStarted,
    encode,
)

AT = 1_767_225_600.0
HOSTILE = "<img src=x onerror=alert(1)></script><script>window.hurt = 1</script>"


def begun(names: list[str]) -> list[AnyEvent]:
    """Nodes with a rank each, which train."""
    nodes = len(names)
    offer = StoreOffer(host="127.0.0.1", port=29500, local_world_size=1)
    command = ("torchrun", "train.py")
    spec = JobSpec(name=f"llama {HOSTILE}", command=command, nodes_min=nodes, nodes_max=nodes, loss_guard="off")
    return [
        ControllerStarted(at=AT, epoch=1),
        JobDefined(at=AT, spec=spec),
        *(NodeJoined(at=AT + 0.1, node=name, host=name, address="127.0.0.1") for name in names),
        *(LauncherReady(at=AT + 1, node=name, attempt=1, offer=offer) for name in names),
        *(WorkersStarted(at=AT + 2, node=name, attempt=1, ranks=(index,)) for index, name in enumerate(names)),
        Progressed(at=AT + 3, attempt=1, step=10, last_step=100, first=True),
    ]


def hanging(nodes: int = 8) -> list[AnyEvent]:
    """The loss spikes; then rank 1 hangs in a hostile function, in a group of a hostile name, and all wait for it."""
    names = [f"n{index}" for index in range(nodes)]
    events, alarm = begun(names), LossAlarm(kind="spike", step=290, usual=2.0, level=30.0)
    for number in range(60):
        loss = 30.0 if number == 40 else 3.0 - number / 40
        at = AT + 4 + 40 * number
        events.append(Progressed(at=at, attempt=1, step=11 + 7 * number, last_step=5000, loss=loss, loss_step=number))
    events.append(LossSeen(at=AT + 1610, attempt=1, alarm=alarm, ranks=(0,)))
    members = f"[0-{nodes - 1}:1]"
    done = CollectiveEntry(group=members, name="0", desc=HOSTILE, seq=6, op="gloo:all_reduce", completed=True)
    open_ = CollectiveEntry(group=members, name="0", desc=HOSTILE, seq=7, op="gloo:all_reduce")
    report = HangReport(kind="missing", ranks=(1,), quiet_s=9.0, limit_s=0.0, phase="", why=f"hangs in {HOSTILE}")
    events.append(HangConfirmed(at=AT + 2410, attempt=1, report=report))
    for rank, name in enumerate(names):
        flight = RankFlight(rank=rank, entries=(done, open_) if rank != 1 else (done,))
        place = Frame(function=HOSTILE if rank == 1 else "all_reduce", file="train.py", line=88)
        stack = RankStack(rank=rank, frames=(place,))
        evidence = NodeEvidence(node=name, attempt=1, request=1, flights=(flight,), stacks=(stack,))
        events.append(EvidenceArrived(at=AT + 2411, evidence=evidence))
    command = OperatorCommand(at=AT + 2415, command="cordon", argument="n3", by="ann", reason=HOSTILE)
    return [*events, TimerFired(at=AT + 2450, timer="evidence"), command]


def story(nodes: int = 2) -> list[AnyEvent]:
    """Some nodes with a rank each; the last rank is killed, and what it printed is hostile."""
    names = [f"n{index}" for index in range(nodes)]
    end = ExitRecord(rank=nodes - 1, local_rank=0, pid=12, code=None, signal=9, ended_at=AT + 9)
    output = RankOutput(rank=nodes - 1, tail=(f"RuntimeError: {HOSTILE}",))
    evidence = NodeEvidence(node=names[-1], attempt=1, exits=(end,), outputs=(output,))
    return [
        *begun(names),
        EvidenceArrived(at=AT + 9.1, evidence=evidence),
        RankEnded(at=AT + 9.1, node=names[-1], attempt=1, exit=end, step=30, last_step=100),
    ]


def job_folder(where: Path, events: list[AnyEvent] | None = None) -> Path:
    folder = where / "unbroken-jobs" / "llama"
    journal, _ = open_journal(folder)
    journal.write([Entry("event", event.at, encode(event)) for event in events or story()])
    journal.close()
    return folder


def serve(server: PageServer) -> Iterator[PageServer]:
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def page(tmp_path: Path) -> Iterator[PageServer]:
    yield from serve(PageServer(0, JobReader(JobHandle(str(job_folder(tmp_path)), "", ""))))


@pytest.fixture
def hung_page(tmp_path: Path) -> Iterator[PageServer]:
    yield from serve(PageServer(0, JobReader(JobHandle(str(job_folder(tmp_path, hanging())), "", ""))))


def ask(
    page: PageServer, path: str, body: object = None, *, key: str | None = None, **headers: str
) -> tuple[int, bytes, dict[str, str]]:
    connection = http.client.HTTPConnection("127.0.0.1", page.server_address[1], timeout=20)
    kind = {} if body is None else {"Content-Type": "application/json"}
    sent = None if body is None else json.dumps(body)
    method = "GET" if body is None else "POST"
    connection.request(method, f"/{page.key if key is None else key}/{path}", sent, kind | headers)
    answer = connection.getresponse()
    content = answer.read()
    connection.close()
    return answer.status, content, dict(answer.getheaders())


def test_a_job_without_a_controller_is_shown_from_its_journal(page: PageServer) -> None:
    status, content, headers = ask(page, "")
    assert (status, headers["Content-Type"]) == (200, "text/html; charset=utf-8")
    assert "default-src 'none'" in headers["Content-Security-Policy"]
    assert b"page.js" in content
    assert [one["id"] for one in json.loads(ask(page, "api/incidents")[1])["incidents"]] == ["i-1"]
    rows = json.loads(ask(page, "api/timeline?since=3")[1])["rows"]
    assert all(row["seq"] > 3 for row in rows)


def test_the_curve_and_the_waits_of_a_job_come_from_its_journal(hung_page: PageServer) -> None:
    curve = json.loads(ask(hung_page, "api/curve")[1])
    assert max(one["loss"] for one in curve["points"] if one["loss"] is not None) == 30.0
    assert [one["kind"] for one in curve["marks"]] == ["spike"]
    incident = json.loads(ask(hung_page, "api/incidents")[1])["incidents"][-1]
    assert [(one["count"], one["suspect"]) for one in incident["waits"]["nodes"]] == [(1, True), (7, False)]
    assert "error" in json.loads(ask(hung_page, "api/ledger")[1])  # none is configured


def test_a_reader_that_is_slow_gets_the_newest_and_nothing_is_kept_for_it() -> None:
    now: dict[str, Any] = {"step": 0, "nodes": [], "checkpoints": []}
    looks = threading.Semaphore(0)

    def read() -> dict[str, Any]:
        now["step"] += 1
        looks.release()
        return dict(now)

    feed = Feed(read)
    slow = feed.parts()
    first = json.loads(next(part for part in slow if part)["status"])["step"]
    for _ in range(first + 3):  # three more looks, of which it reads none
        assert looks.acquire(timeout=60)
    part = next(slow)
    assert list(part) == ["status"]
    assert json.loads(part["status"])["step"] >= first + 2


def test_a_page_too_many_is_told_so() -> None:
    feed = Feed(lambda: {"step": 1, "nodes": [], "checkpoints": []})
    pages = [feed.parts() for _ in range(STREAMS)]
    assert all(next(page) for page in pages)
    assert set(next(feed.parts())) == {"problem"}
    pages.pop().close()
    assert "status" in next(feed.parts())


def test_nothing_is_told_without_the_key_or_to_another_host_name(page: PageServer) -> None:
    assert ask(page, "api/incidents", key="guess")[0] == 404
    assert ask(page, "", key="")[0] == 404
    assert ask(page, "api/incidents", Host="evil.example:80")[0] == 404
    assert ask(page, "api/incidents", Host="localhost:1234")[0] == 200  # through ssh -L
    assert ask(page, "../../etc/passwd")[0] == 404


def test_only_the_page_itself_can_send_commands(page: PageServer) -> None:
    assert ask(page, "api/command", {"command": "stop"}, key="guess")[0] == 400
    plain = {"Content-Type": "text/plain"}
    assert ask(page, "api/command", {"command": "stop"}, **plain)[0] == 400
    assert ask(page, "api/command", {"command": "stop", "reason": "x" * 70_000})[0] == 400
    assert "error" in json.loads(ask(page, "api/command", {"command": "format the disk"})[1])
    assert "error" in json.loads(ask(page, "api/command", {"command": "stop", "sudo": True})[1])


def test_a_command_is_looked_at_before_it_is_given(page: PageServer) -> None:
    would = json.loads(ask(page, "api/command", {"command": "cordon", "argument": "n1"})[1])
    assert (would["command"], would["argument"], would["refused"]) == ("cordon", "n1", False)
    done = json.loads(ask(page, "api/command", {"command": "cordon", "argument": "n1", "dry_run": False})[1])
    assert done.keys() == {"error"}  # no controller: nothing can be done, and it is said


def test_a_command_that_would_do_something_else_by_now_is_not_given(page: PageServer) -> None:
    asked = {"command": "cordon", "argument": "n1"}
    would = json.loads(ask(page, "api/command", asked)[1])
    yes = asked | {"dry_run": False, "agreed": would}
    assert "no controller is known" in json.loads(ask(page, "api/command", yes)[1])["error"]
    yes["agreed"] = would | {"attempt": 7}
    error = json.loads(ask(page, "api/command", yes)[1])["error"]
    assert "Nothing was done" in error
    assert would["would"] in error


def test_a_stream_tells_only_what_has_changed() -> None:
    now: dict[str, Any] = {"step": 1, "nodes": [1, 2, 3], "checkpoints": []}
    feed = Feed(lambda: dict(now))
    parts = feed.parts()
    first = next(part for part in parts if part)
    assert set(first) == {"status", "nodes", "checkpoints", "problem"}
    now["step"] = 2
    assert set(next(part for part in parts if part)) == {"status"}
    now["nodes"] = []
    assert set(next(part for part in parts if part)) == {"nodes"}


def test_a_job_that_cannot_be_read_for_a_while_is_told_as_a_problem() -> None:
    now: list[dict[str, Any] | JobNotFound] = [{"step": 1, "nodes": [], "checkpoints": []}]

    def read() -> dict[str, Any]:
        if isinstance(now[0], JobNotFound):
            raise now[0]
        return now[0]

    parts = Feed(read).parts()
    whole = now[0]
    assert next(part for part in parts if part)["problem"] == b'""'
    now[0] = JobNotFound("gone")
    assert next(part for part in parts if part) == {"problem": b'"gone"'}
    now[0] = whole
    assert next(part for part in parts if part) == {"problem": b'""'}


def test_a_defect_in_one_look_does_not_end_the_stream() -> None:
    now: list[dict[str, Any]] = [{"step": 1, "nodes": [], "checkpoints": []}]
    parts = Feed(lambda: dict(now[0])).parts()
    assert next(part for part in parts if part)["problem"] == b'""'
    whole, now[0] = now[0], {}
    assert b"KeyError" in next(part for part in parts if part)["problem"]
    now[0] = whole
    assert next(part for part in parts if part) == {"problem": b'""'}


def test_what_takes_long_is_asked_rarely() -> None:
    assert pause_s(0.01) == 0.5
    assert pause_s(0.1) == pytest.approx(2.0)
    assert pause_s(60.0) == 5.0


def test_events_change_one_by_one() -> None:
    parts = events({"step": 1, "nodes": [], "checkpoints": [], "name": "x"})
    assert json.loads(parts["status"]) == {"step": 1, "name": "x"}


# ----- in a browser -----

QUIET = ("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(
            executable_path="/usr/bin/chromium", args=[*QUIET, "--disable-component-update", "--disable-sync"]
        )
        yield chromium
        chromium.close()


@pytest.fixture
def tab(browser: Any) -> Iterator[Any]:
    """A tab. An error in the page's script, or something that its policy refused, fails the test."""
    opened = browser.new_page()
    wrong: list[str] = []
    opened.on("pageerror", lambda error: wrong.append(str(error)))
    opened.on("console", lambda message: wrong.append(message.text) if message.type == "error" else None)
    yield opened
    opened.close()
    assert not wrong


@pytest.mark.browser
def test_the_page_says_what_broke_and_hostile_text_stays_text(page: PageServer, tab: Any) -> None:
    tab.goto(page.url)
    tab.locator("#incidents details").first.wait_for()
    assert HOSTILE in tab.locator("#job").inner_text()
    assert "rank 1" in tab.locator("#incidents").inner_text()
    assert tab.evaluate("window.hurt") is None
    assert tab.locator("img").count() == 0
    assert tab.locator("#nodes button").count() == 2


def graph_of(tab: Any) -> dict[str, Any]:
    """What somebody sees of the picture of waits."""
    return {
        "boxes": tab.locator(".waits g").count(),
        "suspects": tab.locator(".waits .suspect .who").all_text_contents(),
        "lines": tab.locator(".waits .wait").count(),
    }


@pytest.mark.browser
def test_a_hang_is_drawn_and_the_loss_is_read_by_keyboard(hung_page: PageServer, tab: Any) -> None:
    tab.goto(f"{hung_page.url}#last")
    tab.locator(".waits").wait_for()
    assert graph_of(tab) == {"boxes": 2, "suspects": ["rank 1 (suspect)"], "lines": 1}
    assert "7 ranks wait for rank 1 in all_reduce 7" in tab.locator("#incidents").inner_text()
    assert tab.locator(".mark.wrong").count() == 2  # beside the loss and beside the rate
    curve = tab.locator("#curve")
    curve.focus()
    tab.keyboard.press("Home")
    assert "step 10" in curve.get_attribute("aria-valuetext")
    tab.keyboard.press("End")
    for _ in range(19):
        tab.keyboard.press("ArrowLeft")
    assert "loss 30," in tab.locator("#reading").inner_text()
    curve.hover(position={"x": 1, "y": 60})
    assert "step 10" in tab.locator("#reading").inner_text()
    assert tab.locator("#not-well button").all_inner_texts() == ["n1: suspect", "n3: cordoned"]
    assert "ann" in tab.locator("#audit").inner_text()
    assert HOSTILE in tab.locator("#audit").inner_text()
    assert HOSTILE[:20] in tab.locator("#incidents").inner_text()
    assert tab.evaluate("window.hurt") is None
    assert tab.locator("img").count() == 0


@pytest.mark.browser
@pytest.mark.parametrize(
    ("scheme", "width"),
    [
        ("light", 1280),
        *(pytest.param(*one, marks=pytest.mark.slow) for one in (("dark", 1280), ("light", 360), ("dark", 360))),
    ],
)
def test_axe_finds_nothing_that_bars_anybody(hung_page: PageServer, tab: Any, scheme: str, width: int) -> None:
    from axe_playwright_python.sync_playwright import Axe

    def violations() -> list[tuple[str, list[str]]]:
        found = Axe().run(tab).response["violations"]
        return [(one["id"], [node["target"][0] for node in one["nodes"]]) for one in found]

    tab.set_viewport_size({"width": width, "height": 800})
    tab.emulate_media(color_scheme=scheme)
    tab.goto(hung_page.url)
    tab.locator(".waits").wait_for()
    tab.locator("#ledger-box summary").click()
    tab.locator("#nodes button").nth(1).click()
    assert violations() == []
    tab.locator("#node button", has_text="Cordon").click()
    tab.locator("#yes:enabled").wait_for()
    assert violations() == []


@pytest.mark.browser
def test_an_operator_looks_decides_and_is_told_by_keyboard_alone(page: PageServer, tab: Any) -> None:
    tab.goto(page.url)
    tab.locator("#nodes button").first.focus()
    tab.keyboard.press("ArrowRight")
    tab.keyboard.press("Enter")
    tab.locator("#node button", has_text="Cordon").focus()
    tab.keyboard.press("Enter")
    tab.locator("#yes:enabled").wait_for()
    assert "n1" in tab.locator("#would").inner_text()
    assert not tab.locator("#argument").is_visible()  # which node is known already
    tab.locator("#reason").fill("a bad cable")
    tab.locator("#yes").focus()
    tab.keyboard.press("Enter")
    tab.locator("#outcome", has_text="Nothing was done").wait_for()  # there is no controller
    tab.keyboard.press("Escape")
    assert not tab.locator("#confirm").is_visible()


@pytest.mark.browser
def test_a_late_answer_is_not_taken_for_that_of_another_command(page: PageServer, tab: Any) -> None:
    held: list[Any] = []
    tab.route("**/api/command", lambda route: held.append(route))

    def press(label: str) -> None:
        with tab.expect_request("**/api/command"):
            tab.locator("#actions button", has_text=label).click()

    def answer(number: int, **told: Any) -> None:
        with tab.expect_response("**/api/command"):
            held[number].fulfill(json=told)
        tab.evaluate("new Promise((done) => setTimeout(done))")

    tab.goto(page.url)
    press("Pause")
    tab.keyboard.press("Escape")
    press("Stop the job")
    answer(0, would="pauses", refused=False)
    assert "Asking" in tab.locator("#would").inner_text()
    assert tab.locator("#yes").is_disabled()
    answer(1, would="stops", refused=False)
    tab.locator("#yes:enabled").click()
    tab.keyboard.press("Escape")
    press("Restart")
    assert held[2].request.post_data_json["agreed"] == {"would": "stops", "refused": False}
    answer(2, notes=["it was stopped"])
    assert not tab.locator("#outcome").inner_text()
    assert "it was stopped" in tab.locator("#problem").inner_text()


@pytest.mark.browser
def test_what_went_wrong_is_looked_at_again_before_it_is_sent_again(page: PageServer, tab: Any) -> None:
    tab.goto(page.url)
    tab.locator("#actions button", has_text="Restart").click()
    tab.locator("#yes:enabled").click()
    tab.locator("#outcome", has_text="Nothing was done").wait_for()
    assert tab.locator("#yes").is_disabled()
    tab.locator("#look").click()
    tab.locator("#yes:enabled").wait_for()


@pytest.mark.browser
def test_it_fits_a_phone(page: PageServer, tab: Any) -> None:
    tab.set_viewport_size({"width": 360, "height": 700})
    tab.emulate_media(color_scheme="dark")
    tab.goto(page.url)
    tab.locator("#timeline li").first.wait_for()
    assert tab.evaluate("document.documentElement.scrollWidth") <= 360


class ManyNodes(JobReader):
    """4,000 nodes with 8 ranks, of which one is lost; an alert; and a step that goes on."""

    def __init__(self, job: JobHandle, nodes: int) -> None:
        super().__init__(job)
        one = super().status()
        some = [one["nodes"][0] | {"node": f"n{n}", "ranks": list(range(8 * n, 8 * n + 8))} for n in range(nodes)]
        some[7]["state"] = "LOST"
        alert = {"key": "a", "node": "n1", "name": "Xid", "failure_class": "gpu_fallen_off_bus", "text": "Xid 79 <b>"}
        alert["at"] = "2026-01-01T00:00:00Z"
        self.now = one | {"nodes": some, "alerts": [alert]}

    def status(self) -> dict[str, Any]:
        self.now = self.now | {"step": self.now["step"] + 1}
        return self.now


@pytest.mark.browser
def test_thousands_of_nodes_are_drawn_and_found(tmp_path: Path, tab: Any) -> None:
    for page in serve(PageServer(0, ManyNodes(JobHandle(str(job_folder(tmp_path)), "", ""), 4000))):
        tab.goto(page.url)
        tab.locator("#nodes button").nth(3999).wait_for()
        tab.locator("#find").fill("n3777")
        assert tab.locator("#nodes .found").get_attribute("data-node") == "n3777"
        tab.locator("#nodes .found").click()
        assert "n3777" in tab.locator("#node").inner_text()
        assert tab.locator('#nodes [tabindex="0"]').count() == 1  # one stop of the Tab key
        ranks = tab.locator("#ranks:visible")
        ranks.focus()
        for key in ("End", "ArrowLeft", "Enter"):
            tab.keyboard.press(key)
        assert (ranks.get_attribute("aria-valuenow"), ranks.get_attribute("aria-valuemax")) == ("31998", "31999")
        assert "rank 31998, local rank 6 on node n3999" in str(ranks.get_attribute("aria-valuetext"))
        assert "n3999" in tab.locator("#node").inner_text()
        assert "8 on a lost node" in tab.locator("#rank-counts").inner_text()
        (row,) = tab.locator("#alerts tbody tr").all()
        assert "Xid 79 <b>" in row.inner_text()
        assert "gpu_fallen_off_bus" in row.inner_text()
        assert "2026-01-0" in row.inner_text() or "2025-12-31" in row.inner_text(), "when it was heard of"
        tab.goto("about:blank")
