"""Requests to the scheduler: one at a time for a node, given again until answered, and given up in the end."""

from supervisor.job.scheduler import FIRST_PAUSE_S, TRIES, UNANSWERED_S, PendingRequest, RequestQueue


def anything(_: PendingRequest) -> bool:
    return True


def test_an_order_goes_out_once_and_again_when_nobody_answers() -> None:
    queue = RequestQueue()
    request = queue.add("drain", node="n1", reason="unbroken: x", by_policy=True).request
    assert queue.take(0.0, anything) == [request]
    assert queue.take(1.0, anything) == []
    assert queue.next_due(anything) == UNANSWERED_S
    assert queue.take(UNANSWERED_S, anything) == [request]
    queue.give_again(200.0)
    assert queue.take(200.0, anything) == [request], "a new controller has not given it out"
    found = queue.answered(request.number, "done", 201.0)
    assert found is not None
    assert found[1]
    assert queue.answered(request.number, "done", 202.0) is None
    assert queue.next_due(anything) is None


def test_a_scheduler_that_is_away_is_asked_again_later_and_later_and_then_no_more() -> None:
    queue = RequestQueue()
    request = queue.add("drain", node="n1", by_policy=True).request
    now, pauses = 0.0, []
    while True:
        assert queue.take(now, anything) == [request]
        found = queue.answered(request.number, "unavailable", now)
        assert found is not None
        if found[1]:
            break
        due = queue.next_due(anything)
        assert due is not None
        pauses.append(due - now)
        now = due
    assert pauses[:3] == [FIRST_PAUSE_S, 2 * FIRST_PAUSE_S, 4 * FIRST_PAUSE_S]
    assert len(pauses) == TRIES - 1
    assert max(pauses) <= 300.0


def test_orders_about_one_node_keep_their_order_and_a_newer_one_replaces_one_that_waits() -> None:
    queue = RequestQueue()
    drain = queue.add("drain", node="n1", by_policy=True).request
    assert queue.take(0.0, anything) == [drain]
    undrain = queue.add("undrain", node="n1", by_policy=False).request
    other = queue.add("drain", node="n2", by_policy=True).request
    assert queue.take(0.0, anything) == [other], "the first one is under way"
    assert queue.next_due(anything) == UNANSWERED_S, "what waits behind another sets no timer"
    queue.answered(drain.number, "unavailable", 1.0)
    assert queue.take(1.0, anything) == [undrain], "a drain that nobody wants any more is not tried again"
    queue.answered(undrain.number, "unavailable", 2.0)
    again = queue.add("drain", node="n1", by_policy=False).request
    assert queue.take(2.0, anything) == [again]


def test_what_may_not_go_out_waits_without_a_timer() -> None:
    queue = RequestQueue()
    queue.add("drain", node="n1", by_policy=True)
    assert queue.take(0.0, lambda _: False) == []
    assert queue.next_due(lambda _: False) is None
    assert queue.next_due(anything) == 0.0
