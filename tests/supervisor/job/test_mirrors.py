"""The job with mirrored snapshots: which step nodes copy, and from what the attempt after a node's loss may start."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec
import pytest

from recovery.checkpoint import Checkpoint
from recovery.snapshot_choice import NodeSnapshot, RankSnapshot, SnapshotPart
from recovery.tiers import NodeTiers
from supervisor import messages as m
from supervisor.controller.metrics import _snapshots


class Cluster:
    """Nodes a and b run two ranks each, c and d are spares."""

    def __init__(self, make_driver: Any, **more: Any) -> None:
        self.told: set[str] = set()
        given = {"checkpoint_dirs": ("/c",), "publish_to": "/shared", "mirror_snapshots": True, **more}
        self.driver = make_driver(nodes_min=2, nodes_max=2, spares=2, mode="enforce", **given)
        self.driver.join("a", "b")
        self.driver.join("c", "d", spare=True)
        for name in "abcd":
            self.tell(name)
        self.driver.up()

    def tell(self, node: str, *held: SnapshotPart) -> None:
        if node in self.told:
            self.driver.tell(m.SnapshotCopiesSeen, node=node, snapshots=held)
        else:
            self.driver.tell(m.TiersSeen, node=node, tiers=NodeTiers(port=7000, snapshots=held, rested=9))
            self.told.add(node)
        if "tiers" in self.driver.job.timers:
            self.driver.fire("tiers")

    def seen(self, step: int, attempt: int = 1) -> None:
        self.driver.tell(m.SnapshotSeen, after=10.0, attempt=attempt, step=step)

    def mirror(self, step: int, attempt: int = 1) -> None:
        """c has a's, d has b's."""
        a, b = part("a", 0, step, attempt, self.driver.now), part("b", 2, step, attempt, self.driver.now)
        for node, own in {"a": a, "b": b, "c": a, "d": b}.items():
            self.tell(node, own)

    def lose(self, node: str) -> None:
        self.driver.tell(m.NodeLost, node=node, silent_s=30.0)
        while self.driver.state == "DIAGNOSING":
            self.driver.fire("evidence")
        if self.driver.state == "RECOVERING":
            self.driver.fire("backoff")

    def offer(self, *held: tuple[int, int]) -> Any:
        """What the next attempt starts from if every node has these in memory."""
        for place, name in enumerate(self.driver.job.attempt.members):
            snapshots = tuple(
                NodeSnapshot(attempt=one, step=step, first_rank=2 * place, ranks=2, world=4, at=self.driver.now)
                for one, step in held
            )
            given = m.StoreOffer(host=name, port=1, local_world_size=2, snapshots=snapshots)
            self.driver.tell(m.LauncherReady, node=name, attempt=self.driver.number, offer=given)
        return self.driver.told["a"].round.snapshot

    def of(self, node: str) -> Any:
        return self.driver.told[node].tiers.snapshots


def part(owner: str, first: int, step: int, attempt: int, at: float) -> SnapshotPart:
    return SnapshotPart(
        attempt=attempt, step=step, world=4, first_rank=first, ranks=2, owner=owner, at=at, size_bytes=100
    )


@pytest.fixture
def cluster(make_driver: Any) -> Cluster:
    made = Cluster(make_driver)
    made.seen(20)
    made.seen(40)
    return made


def checkpoint(driver: Any, step: int) -> None:
    found = Checkpoint(path=f"/elsewhere/{step}", step=step, format="x", complete=True, modified_at=driver.now)
    driver.tell(m.CheckpointsSeen, node="a", checkpoints=(found,))


def test_all_nodes_are_told_of_one_step_that_is_still_to_come(cluster: Cluster) -> None:
    orders = {node: cluster.of(node) for node in "abcd"}
    assert {(one.attempt, one.from_step) for one in orders.values()} == {(1, 46)}
    assert [(orders[node].first_rank, orders[node].ranks) for node in "abcd"] == [(0, 2), (2, 2), (0, 0), (0, 0)]


def test_an_older_copy_stays_until_the_next_is_mirrored(cluster: Cluster) -> None:
    cluster.mirror(46)
    assert cluster.of("a").from_step == 46, "so soon no other one is named"
    cluster.seen(60)
    cluster.seen(70)
    for node in "abcd":
        assert cluster.of(node).from_step > 60
        assert cluster.of(node).keep == ((1, 46),)
    cluster.mirror(80)
    assert cluster.of("a").keep == ((1, 80),)
    assert cluster.driver.job.view().mirrored_snapshot.step == 80


def test_in_a_long_run_steps_are_named_less_often(cluster: Cluster) -> None:
    """The journal keeps every one of them."""
    named: list[float] = []
    step, target = 40, 46
    for _ in range(450):
        step += 20
        cluster.seen(step)
        if target <= step:
            cluster.mirror(target)
        if cluster.of("a").from_step != target:
            target = cluster.of("a").from_step
            named.append(cluster.driver.now)
    pauses = [after - before for before, after in itertools.pairwise(named)]
    assert max(pauses[:5]) <= 20
    assert 60 <= min(pauses[-5:]) <= max(pauses[-5:]) <= 80


def test_a_spare_gets_the_lost_node_s_part_and_the_survivor_its_own(cluster: Cluster) -> None:
    cluster.mirror(46)
    cluster.lose("b")
    assert cluster.driver.job.attempt.members == ("a", "c")
    for node, first, owner, source in (("a", 0, "a", "a"), ("c", 2, "b", "d")):
        bring = cluster.of(node).bring
        assert (bring.attempt, bring.step, bring.world, bring.first_rank, bring.ranks) == (1, 46, 4, first, 2)
        assert {one.owner for one in bring.sources} == {owner}
        assert bring.sources[0].node == source
    assert cluster.of("d").bring is None
    assert cluster.offer((1, 46)) == (1, 46)
    assert cluster.driver.replayed().attempt.round == cluster.driver.job.attempt.round


def test_a_node_that_did_not_get_its_part_leads_to_the_checkpoint(cluster: Cluster) -> None:
    cluster.mirror(46)
    cluster.lose("b")
    assert cluster.of("c").bring is not None
    assert cluster.offer() is None


def test_what_is_not_brought(cluster: Cluster) -> None:
    cluster.mirror(46)
    cluster.driver.crash("a", 1)
    if cluster.driver.state == "RECOVERING":
        cluster.driver.fire("backoff")
    assert cluster.driver.job.attempt.members == ("a", "b")
    assert cluster.of("a").bring is None, "what their own slots have is newer"


def test_a_newer_checkpoint_is_taken(cluster: Cluster) -> None:
    cluster.mirror(46)
    checkpoint(cluster.driver, 46)
    cluster.lose("b")
    assert cluster.of("a").bring is None


def test_a_part_that_is_lost_with_its_peer_leads_to_the_checkpoint(cluster: Cluster) -> None:
    cluster.mirror(46)
    cluster.lose("d")
    cluster.lose("b")
    assert cluster.of("a").bring is None


def test_only_the_attempt_that_has_just_ended_counts(cluster: Cluster) -> None:
    """Else what could not be loaded would be brought again and again."""
    cluster.mirror(46)
    cluster.lose("b")
    cluster.offer((1, 46))
    cluster.driver.up(47)
    assert cluster.of("a").keep == ()
    cluster.lose("c")
    assert cluster.driver.job.attempt.members == ("a", "d")
    assert cluster.of("a").bring is None


def test_what_the_script_has_gone_back_behind_is_not_brought(cluster: Cluster) -> None:
    """By itself, in the same attempt: copies of steps that it is still to make once more are of another run."""
    cluster.mirror(46)
    cluster.seen(60)
    cluster.seen(30)
    assert cluster.driver.job.view().mirrored_snapshot is msgspec.UNSET
    assert {(cluster.of(node).attempt, cluster.of(node).keep) for node in "abcd"} == {(0, ())}, "all of them are freed"
    cluster.lose("b")
    assert cluster.of("c").bring is None
    assert cluster.driver.replayed().attempts.mirrors.candidates() == []


def test_parts_from_before_and_after_it_went_back_are_never_one(cluster: Cluster) -> None:
    """a's copy of step 46 is old, and b, which had missed it, copies the step that is made anew."""
    cluster.tell("a", part("a", 0, 46, 1, cluster.driver.now))
    cluster.seen(52)
    cluster.seen(30)
    cluster.tell("c", part("a", 0, 52, 1, cluster.driver.now))  # told late
    cluster.seen(40)
    assert cluster.of("b").attempt == 0
    cluster.tell("b", part("b", 2, 46, 1, cluster.driver.now))
    cluster.tell("d", part("b", 2, 52, 1, cluster.driver.now))
    assert cluster.driver.job.attempts.mirrors.candidates() == []
    cluster.seen(52)
    assert cluster.of("b").attempt == 0, "step 52 may have been copied before"
    cluster.seen(60)
    assert cluster.of("b").from_step > 60
    cluster.mirror(66)
    assert cluster.driver.job.view().mirrored_snapshot.step == 66
    cluster.lose("b")
    assert cluster.of("c").bring.step == 66


def test_a_snapshot_that_was_brought_is_no_going_back(cluster: Cluster) -> None:
    cluster.mirror(46)
    cluster.seen(60)
    cluster.lose("b")
    cluster.seen(46)  # all of them have it now
    cluster.lose("c")
    assert cluster.driver.job.attempt.members == ("a", "d")
    assert cluster.of("d").bring.step == 46


def test_what_was_written_while_the_numbers_were_wrong_is_not_brought(cluster: Cluster) -> None:
    cluster.driver.tell(m.NumbersSeen, after=5, attempt=1, bad=True, step=44, ranks=(0,))
    cluster.driver.now += 5
    cluster.mirror(46)
    cluster.lose("b")
    assert cluster.of("a").bring is None


@pytest.mark.parametrize("more", [{"mirror_snapshots": False}, {"publish_to": ""}])
def test_nothing_is_asked_unless_the_user_wants_it(make_driver: Any, more: dict[str, Any]) -> None:
    cluster = Cluster(make_driver, **more)
    cluster.seen(20)
    cluster.seen(40)
    cluster.mirror(46)
    cluster.lose("b")
    for node in "acd":
        tiers = cluster.driver.told[node].tiers
        assert tiers is None or tiers.snapshots is None


def test_after_a_requeue_nothing_of_the_nodes_before_counts(make_driver: Any) -> None:
    cluster = Cluster(make_driver, scheduler="slurm", scheduler_job="7")
    cluster.seen(20), cluster.seen(40)
    cluster.mirror(46)
    driver = cluster.driver
    driver.tell(m.JobRequeued, requeues=1)
    driver.tell(m.ControllerStarted, epoch=2)
    driver.tell(m.JobDefined, spec=msgspec.structs.replace(driver.job.spec, requeues=1, ends_at=9e9))
    driver.join("e", "f")
    driver.join("g", "h", spare=True)
    for name in "efgh":
        cluster.tell(name)
    assert driver.job.view().mirrored_snapshot is msgspec.UNSET
    assert (cluster.of("e").bring, cluster.of("e").keep, cluster.of("e").ranks) == (None, (), 0)
    driver.up()
    cluster.seen(20, driver.number), cluster.seen(40, driver.number)
    assert (cluster.of("e").attempt, cluster.of("e").ranks) == (driver.number, 2)
    assert cluster.of("e").from_step > 40


def test_the_metrics_tell_which_snapshot_is_mirrored(cluster: Cluster) -> None:
    cluster.mirror(46)
    local = RankSnapshot(rank=0, world=4, attempt=1, step=50, at=5.0)
    told = {(one.name, one.labels): one.value for one in _snapshots(local, cluster.driver.job.attempts.mirrors.newest)}
    assert told["unbroken_job_checkpoint_tier_step", ("snapshot_local",)] == 50
    assert told["unbroken_job_checkpoint_tier_step", ("snapshot_mirrored",)] == 46


def test_at_the_end_nothing_is_kept(cluster: Cluster) -> None:
    cluster.mirror(46)
    cluster.driver.order("stop")
    orders = cluster.of("c")
    assert (orders.attempt, orders.ranks, orders.keep) == (0, 0, ())
