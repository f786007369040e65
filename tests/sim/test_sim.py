"""Seeded simulations: the job recovers or ends, whatever happens, and nothing is done twice."""

from __future__ import annotations

from typing import Any

import pytest

CURABLE = frozenset({"worker_crash", "silent_hang", "unknown", "node_failure", "nccl_network", "gpu_ecc_uncorrectable"})
ROUGH = {"loss": 0.05, "duplicate": 0.05, "reorder": 0.05, "prepare": 0.02}


def _recovers(world: Any, seed: int, target: int = 1500, **how: Any) -> None:
    """After the faults stop the job reaches its last step."""
    w = world(seed, **how)
    w.verdicts = CURABLE
    w.fingerprints, w.curable = ("",), True
    w.rates = {**ROUGH, "prepare": ROUGH["prepare"] * 3 / len(w.nodes)}
    w.target = target
    w.run()
    assert w.ended is not None, f"seed {seed}: {w.job.state}, waits for {w.job.waiting!r}"
    assert w.ended.state == "succeeded", f"seed {seed}: {w.ended}"
    assert not w.job.incidents.log.open_failures()
    w.check_replay()


def _ends(world: Any, seed: int, **how: Any) -> None:
    """With verdicts of all kinds it may be stopped; it must end all the same."""
    w = world(seed, **how)
    w.rates = ROUGH
    w.target = 1500
    w.run(6000.0)
    assert w.ended is not None, f"seed {seed}: {w.job.state}, waits for {w.job.waiting!r}"
    w.check_replay()


@pytest.mark.parametrize("seed", range(4))
def test_it_runs_again_when_faults_stop(world: Any, seed: int) -> None:
    _recovers(world, seed)


@pytest.mark.parametrize("seed", range(100, 104))
def test_it_ends_whatever_the_diagnosis_says(world: Any, seed: int) -> None:
    _ends(world, seed)


def test_the_breaker_is_reached_and_holds(world: Any) -> None:
    """Every diagnosis blames a node, spares abound: after two nodes an operator is asked."""
    held = 0
    for seed in range(5):
        w = world(seed, nodes=4, spares=8)
        w.verdicts, w.fingerprints, w.target = frozenset({"gpu_fallen_off_bus"}), ("",), 400
        w.run()
        held += sum("an operator decides" in line.text for line in w.job.story)
    assert held


@pytest.mark.parametrize("racks", [True, False])
def test_a_rack_that_fails_is_no_mass_cordon(world: Any, racks: bool) -> None:
    """Its nodes are held for, or one that was the first to tell is left out; without racks two may be."""
    held = 0
    for seed in range(8):
        w = world(seed, nodes=16, spares=8, faults_s=0.0)
        w.verdicts, w.fingerprints, w.target = frozenset({"gpu_fallen_off_bus"}), ("",), 600
        for node in w.nodes.values():
            node.domain = f"spine.leaf{node.order // 4}" if racks else ""
        rack = [node.name for node in w.nodes.values() if node.order // 4 == 1]
        w.later(60.0, w.rack_fails, rack, 20.0)
        w.run()
        out = {name for name in rack if w.policy_cordons.get(name)}
        assert len(out) <= (1 if racks else 2), f"seed {seed}: {out}"
        held += sum("an operator decides" in line.text for line in w.job.story)
        w.check_replay()
    assert held


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1000, 1050))
def test_many_seeds(world: Any, seed: int) -> None:
    nodes, spares = 2 + seed % 5, seed % 3
    _recovers(world, seed, nodes=nodes, spares=spares, nodes_min=max(2, nodes - seed % 2))
    _ends(world, seed, nodes=nodes, spares=spares, max_restarts=5, mode=("enforce", "recommend")[seed % 2])


def test_hundreds_of_nodes(world: Any) -> None:
    _recovers(world, 7, target=120, nodes=300, spares=2, faults_s=15.0)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.lasts(35)
def test_thousands_of_nodes(world: Any) -> None:
    _recovers(world, 2000, target=150, nodes=2000, spares=4, faults_s=30.0)


def _meddled(world: Any, seed: int, **how: Any) -> Any:
    """Under a scheduler that starts the job again, with operators who order anything; then it comes to its end."""
    w = world(seed, scheduler="slurm", scheduler_job="7", max_requeues=3, wait_for_nodes_s=120.0, **how)
    w.verdicts, w.fingerprints, w.curable = CURABLE, ("",), True
    w.rates = {**ROUGH, "meddle": 0.2}
    w.target = 1500
    w.run(9000.0)
    assert w.ended is not None, f"seed {seed}: {w.job.state}, waits for {w.job.waiting!r}"
    w.check_replay()
    return w


@pytest.mark.parametrize("seed", range(200, 205))
def test_operators_win_whatever_happens(world: Any, seed: int) -> None:
    _meddled(world, seed)


def test_the_simulation_gives_orders_and_starts_jobs_again(world: Any) -> None:
    worlds = [_meddled(world, seed, spares=0) for seed in (*range(300, 305), 320)]
    told = {order.kind for w in worlds for order in w.orders_told}
    assert told == {"drain", "undrain", "requeue", "end_step"}
    assert any(w.lives for w in worlds)


def _to_its_end(w: Any, seed: int) -> Any:
    """Among all other faults, to a good end that replays to the same decisions."""
    w.verdicts, w.fingerprints, w.curable = CURABLE, ("",), True
    w.target = 1500
    w.run(9000.0)
    assert w.ended is not None, f"seed {seed}: {w.job.state}, waits for {w.job.waiting!r}"
    assert w.ended.state == "succeeded", f"seed {seed}: {w.ended}"
    w.check_replay()
    return w


def test_suspects_are_tested_among_all_other_faults(world: Any) -> None:
    """The job goes on whatever becomes of the tests, and what was journalled decides the same again."""
    tested = []
    for seed in range(700, 704):
        w = world(seed, nodes=4, spares=6, test_suspects=True)
        w.verdicts, w.fingerprints, w.curable = frozenset({"nccl_network", "nccl_timeout"}), ("",), True
        w.rates, w.target = ROUGH, 1500
        w.run(9000.0)
        assert w.ended is not None, f"seed {seed}: {w.job.state}, waits for {w.job.waiting!r}"
        w.check_replay()
        tested += [record.tests for record in w.job.incidents.log.records if record.tests is not None]
    assert any(one.passed for one in tested)
    assert any(one.unknown for one in tested)


def _taken_back(world: Any, seed: int, **how: Any) -> Any:
    """The loss goes wrong again and again, and operators go back and forth."""
    w = world(seed, loss_guard="enforce", **how)
    w.rates = {**ROUGH, "go_back": 0.1}
    return _to_its_end(w, seed)


def test_rollbacks_never_resume_from_what_is_too_new(world: Any) -> None:
    assert sum(_taken_back(world, seed).rolled_back for seed in range(400, 405)) > 5


def _worn(world: Any, seed: int, **how: Any) -> Any:
    """Devices fail and degrade, and operators have nodes swapped."""
    w = world(seed, swap_mode="automatic", **how)
    w.rates = {**ROUGH, "wear": 0.1}
    return _to_its_end(w, seed)


def test_nodes_that_degrade_leave_and_the_job_comes_to_its_end(world: Any) -> None:
    worlds = [_worn(world, seed, spares=3) for seed in range(500, 505)]
    assert sum(sum(w.job.swaps.made.values()) for w in worlds) > 3
    assert any(
        record.trigger == "hang" and record.hang.early
        for w in worlds
        for record in w.job.incidents.log.records
        if record.hang
    )


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5000, 5040))
def test_nodes_that_degrade_in_many_seeds(world: Any, seed: int) -> None:
    modes = ("enforce", "recommend", "observe")
    _worn(world, seed, nodes=2 + seed % 4, spares=seed % 4, mode=modes[seed % 3] if seed % 3 < 2 else "enforce")


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3000, 3060))
def test_rollbacks_in_many_seeds(world: Any, seed: int) -> None:
    _taken_back(world, seed, nodes=2 + seed % 3, spares=seed % 2, mode=("enforce", "recommend")[seed % 2])


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2000, 2100))
def test_operators_win_in_many_seeds(world: Any, seed: int) -> None:
    _meddled(world, seed, nodes=2 + seed % 4, spares=seed % 3)
