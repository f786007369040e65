from recovery.policy import HOUR_FACTOR, LONGEST_DELAY_S, WINDOW_S, RestartBudget


def test_first_restart_comes_at_once_and_repeats_wait_longer() -> None:
    budget = RestartBudget(max_restarts=5)
    delays = []
    for second in range(5):
        delays.append(budget.next_delay_s(float(second)))
        budget.charge(float(second))
    assert delays == [0.0, 1.0, 2.0, 4.0, 8.0]
    assert budget.next_delay_s(6.0) is None


def test_progress_gives_the_budget_back() -> None:
    budget = RestartBudget(max_restarts=1)
    budget.charge(0.0)
    assert budget.next_delay_s(1.0) is None
    budget.progressed()
    assert budget.next_delay_s(1.0) == 0.0


def test_the_back_off_is_capped() -> None:
    budget = RestartBudget(max_restarts=100)
    for second in range(50):
        budget.charge(float(second))
    assert budget.next_delay_s(50.0) == LONGEST_DELAY_S


def test_a_job_that_fails_every_few_seconds_is_stopped_although_it_progresses() -> None:
    budget = RestartBudget(max_restarts=2)
    for second in range(2 * HOUR_FACTOR):
        budget.charge(float(second))
        budget.progressed()
    assert budget.next_delay_s(30.0) is None
    assert budget.next_delay_s(WINDOW_S + 30.0) == 0.0


def test_no_restarts_at_all() -> None:
    assert RestartBudget(max_restarts=0).next_delay_s(0.0) is None
