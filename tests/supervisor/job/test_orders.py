"""Orders to the scheduler: one at a time for a node, given again until answered, and given up in the end."""

from supervisor.job.orders import FIRST_PAUSE_S, TRIES, UNANSWERED_S, OrderBook, Pending


def anything(_: Pending) -> bool:
    return True


def test_an_order_goes_out_once_and_again_when_nobody_answers() -> None:
    book = OrderBook()
    order = book.add("drain", node="n1", reason="unbroken: x", by_policy=True).order
    assert book.take(0.0, anything) == [order]
    assert book.take(1.0, anything) == []
    assert book.next_due(anything) == UNANSWERED_S
    assert book.take(UNANSWERED_S, anything) == [order]
    book.again(200.0)
    assert book.take(200.0, anything) == [order], "a new controller has not given it out"
    found = book.answered(order.number, "done", 201.0)
    assert found is not None
    assert found[1]
    assert book.answered(order.number, "done", 202.0) is None
    assert book.next_due(anything) is None


def test_a_scheduler_that_is_away_is_asked_again_later_and_later_and_then_no_more() -> None:
    book = OrderBook()
    order = book.add("drain", node="n1", by_policy=True).order
    now, pauses = 0.0, []
    while True:
        assert book.take(now, anything) == [order]
        found = book.answered(order.number, "unavailable", now)
        assert found is not None
        if found[1]:
            break
        due = book.next_due(anything)
        assert due is not None
        pauses.append(due - now)
        now = due
    assert pauses[:3] == [FIRST_PAUSE_S, 2 * FIRST_PAUSE_S, 4 * FIRST_PAUSE_S]
    assert len(pauses) == TRIES - 1
    assert max(pauses) <= 300.0


def test_orders_about_one_node_keep_their_order_and_a_newer_one_replaces_one_that_waits() -> None:
    book = OrderBook()
    drain = book.add("drain", node="n1", by_policy=True).order
    assert book.take(0.0, anything) == [drain]
    undrain = book.add("undrain", node="n1", by_policy=False).order
    other = book.add("drain", node="n2", by_policy=True).order
    assert book.take(0.0, anything) == [other], "the first one is under way"
    assert book.next_due(anything) == UNANSWERED_S, "what waits behind another sets no timer"
    book.answered(drain.number, "unavailable", 1.0)
    assert book.take(1.0, anything) == [undrain], "a drain that nobody wants any more is not tried again"
    book.answered(undrain.number, "unavailable", 2.0)
    again = book.add("drain", node="n1", by_policy=False).order
    assert book.take(2.0, anything) == [again]


def test_what_may_not_go_out_waits_without_a_timer() -> None:
    book = OrderBook()
    book.add("drain", node="n1", by_policy=True)
    assert book.take(0.0, lambda _: False) == []
    assert book.next_due(lambda _: False) is None
    assert book.next_due(anything) == 0.0
