"""The job with checkpoints on the nodes' own disks: what it chooses, what it asks nodes for."""

from __future__ import annotations

from typing import Any

import pytest

from recovery.checkpoint import ROLLED_BACK, Checkpoint, PutBack
from recovery.tiers import NodeTiers, NotBrought, PartFile, PublishedSave, SavePart
from supervisor import messages as m
from supervisor.job.tiers import SETTLE_S

HERE = "/local/ckpt"


def part(node: str, step: int, attempt: int = 1) -> SavePart:
    """Node a has `.metadata`."""
    rank = "ab".index(node)
    save = f"step-{step}"
    names = [f"{save}/__{rank}_0.distcp", *([f"{save}/.metadata"] if node == "a" else [])]
    needs = [f"{save}/__0_0.distcp", f"{save}/__1_0.distcp"] if node == "a" else []
    return SavePart(
        name=save,
        owner=node,
        attempt=attempt,
        format="dcp",
        step=step,
        modified_at=1000.0 + step,
        files=tuple(PartFile(name=name, size=10) for name in names),
        needs=tuple(PartFile(name=name, size=10) for name in needs),
    )


class Cluster:
    """Nodes a and b run, c is a spare."""

    def __init__(self, make_driver: Any) -> None:
        self.driver = make_driver(
            nodes_min=2, nodes_max=2, spares=1, checkpoint_dirs=(HERE,), publish_to="/shared", mode="enforce"
        )
        self.reports = {name: NodeTiers(port=7000) for name in "abc"}
        for name in "ab":
            self.driver.join(name)
        self.driver.join("c", spare=True)
        for name in "abc":
            self.tell(name)
        self.work_out()
        self.driver.up()

    def tell(self, node: str, **changed: Any) -> None:
        fields = {name: getattr(self.reports[node], name) for name in NodeTiers.__struct_fields__}
        self.reports[node] = NodeTiers(**{**fields, **changed})
        self.driver.tell(m.TiersSeen, node=node, tiers=self.reports[node])

    def work_out(self) -> None:
        if "tiers" in self.driver.job.timers:
            self.driver.fire("tiers")

    def save(self, *steps: int, mirrored: bool = True) -> None:
        parts = {node: tuple(part(node, step) for step in sorted(steps, reverse=True)) for node in "ab"}
        peers = {node: self.driver.told[node].tiers.peer.node for node in "ab"}
        for node in "ab":
            self.tell(node, parts=parts[node])
        for node, peer in peers.items() if mirrored else ():
            self.tell(peer, mirrors=(*self.reports[peer].mirrors, *parts[node]))
        self.work_out()

    def rest(self, *nodes: str) -> None:
        for node in nodes:
            self.tell(node, rested=self.driver.number - 1)
        self.work_out()

    def lose(self, node: str) -> None:
        self.driver.tell(m.NodeLost, node=node, silent_s=30.0)
        while self.driver.state == "DIAGNOSING":
            self.driver.fire("evidence")
        self.work_out()

    def of(self, node: str) -> m.Assignment:
        return self.driver.told[node]


@pytest.fixture
def cluster(make_driver: Any) -> Cluster:
    return Cluster(make_driver)


def test_each_node_has_a_peer_and_the_spare_may_be_one(cluster: Cluster) -> None:
    peers = {node: cluster.of(node).tiers.peer.node for node in "abc"}
    assert set(peers.values()) == set("abc")
    assert all(node != peer for node, peer in peers.items())


def test_the_next_attempt_resumes_from_what_survivors_hold(cluster: Cluster) -> None:
    cluster.save(10)
    cluster.save(10, 20, mirrored=False)
    cluster.lose("b")
    cluster.rest("a", "c")
    for node in "ac":
        order = cluster.of(node)
        assert (order.stage, order.resume.path, order.resume.step) == ("form", f"{HERE}/step-10", 10)
        assert order.tiers.bring.save.name == "step-10"
        assert [step.path for step in order.prepare] == [f"{HERE}/step-20"], "on every node"
        assert {source.owner for source in order.tiers.bring.sources} == {"a", "b"}
        assert not {source.node for source in order.tiers.bring.sources} & {"b"}


def test_what_nodes_have_not_told_yet_is_neither_offered_nor_moved(cluster: Cluster) -> None:
    """Node b has not looked since the crash: its part of step 20 may be there."""
    cluster.save(10)
    cluster.tell("a", parts=(part("a", 20), part("a", 10)))
    cluster.work_out()
    cluster.driver.crash("a", 1)
    cluster.rest("a")
    order = cluster.of("a")
    assert (order.stage, order.resume.path, order.prepare) == ("form", "", ())
    number = cluster.driver.number
    cluster.tell("b", parts=(part("b", 20), part("b", 10)))
    cluster.rest("b")
    assert cluster.of("a").resume.path == f"{HERE}/step-20"
    assert cluster.driver.number > number, "nodes prepare once more"


def test_news_are_worked_out_before_launchers_are_let_go(cluster: Cluster) -> None:
    cluster.save(10)
    cluster.driver.crash("a", 1)
    for node in "ab":
        cluster.tell(node, rested=1)
    for node, step in (("a", 20), ("b", 20)):
        cluster.tell(node, parts=(part(node, step), part(node, 10)))
    number = cluster.driver.number
    for node in "ab":
        offer = m.StoreOffer(host=node, port=1, local_world_size=2)
        cluster.driver.tell(m.LauncherReady, node=node, attempt=number, offer=offer)
    assert cluster.of("a").resume.path == f"{HERE}/step-20"
    assert (cluster.of("a").stage, cluster.driver.number) == ("form", number + 1)


def test_a_save_that_a_node_cannot_get_gives_way_to_an_older_one(cluster: Cluster) -> None:
    cluster.save(10, 20)
    cluster.lose("b")
    cluster.rest("a", "c")
    assert cluster.of("c").resume.step == 20
    cluster.tell("c", failed=(NotBrought(name="step-20", attempt=1, why="the link is cut"),))
    cluster.work_out()
    assert cluster.of("c").resume.step == 10
    assert cluster.of("c").tiers.bring.save.name == "step-10"
    (aside,) = cluster.of("a").prepare
    assert aside.path == f"{HERE}/step-20"
    assert aside.why.startswith(ROLLED_BACK), "it is whole: that can be undone"
    cluster.tell("c", failed=())
    cluster.work_out()
    assert cluster.of("c").resume.step == 20
    assert cluster.of("c").prepare == (PutBack(path=f"{HERE}/step-20"),)


def test_a_mover_that_was_started_again_is_asked_at_its_new_port(cluster: Cluster) -> None:
    cluster.save(10)
    cluster.driver.crash("a", 1)
    cluster.rest("a", "b")
    number = cluster.driver.number
    cluster.tell("b", port=7001)
    cluster.work_out()
    assert {one.port for one in cluster.of("a").tiers.bring.sources if one.node == "b"} == {7001}
    assert cluster.driver.number == number


def hf(step: int, attempt: int = 0) -> SavePart:
    return SavePart(
        name=f"checkpoint-{step}",
        owner="a",
        attempt=attempt,
        format="hf",
        step=step,
        modified_at=float(step),
        files=(PartFile(name=f"checkpoint-{step}/trainer_state.json", size=10),),
        whole=True,
    )


@pytest.mark.parametrize("attempt", [0, 900])
def test_what_was_there_before_the_job_is_resumed_from(make_driver: Any, attempt: int) -> None:
    """Its attempt is none of this job's, or was so long ago that its nodes are forgotten."""
    driver = make_driver(nodes_min=1, nodes_max=1, checkpoint_dirs=(HERE,), publish_to="/shared", mode="enforce")
    driver.join("a")
    found = tuple(
        Checkpoint(path=f"{HERE}/checkpoint-{s}", step=s, format="hf", complete=True, modified_at=float(s))
        for s in (200, 100)
    )
    driver.tell(m.CheckpointsSeen, node="a", checkpoints=found, folders=(HERE,))
    driver.tell(m.TiersSeen, node="a", tiers=NodeTiers(port=7000, parts=(hf(200, attempt), hf(100, attempt))))
    driver.fire("tiers")
    order = driver.told["a"]
    assert order.prepare == ()
    if attempt:
        assert order.resume.path == "", "not every node has looked yet"
        tiers = NodeTiers(port=7000, parts=(hf(200, attempt), hf(100, attempt)), rested=attempt)
        driver.tell(m.TiersSeen, node="a", tiers=tiers)
        driver.fire("tiers")
    assert driver.told["a"].resume.path == f"{HERE}/checkpoint-200"


def test_with_its_peer_gone_too_the_published_one_is_left(cluster: Cluster) -> None:
    cluster.save(10, 20)
    published = (PublishedSave(name="step-10", attempt=1, format="dcp", step=10),)
    for node in "abc":
        cluster.tell(node, published=published, mirrors=())
    cluster.work_out()
    cluster.lose("b")
    cluster.rest("a", "c")
    bring = cluster.of("a").tiers.bring
    assert cluster.of("a").resume.step == 10
    assert bring.published


def test_one_node_commits_once_every_part_is_staged(cluster: Cluster) -> None:
    cluster.save(10)
    key = (("step-10", 1, 0),)
    cluster.tell("b", staged=key)
    cluster.work_out()
    assert not any(cluster.of(node).tiers.commit for node in "abc")
    cluster.tell("a", staged=key)
    cluster.work_out()
    assert [save.name for save in cluster.of("a").tiers.commit] == ["step-10"]
    assert not cluster.of("b").tiers.commit
    assert not cluster.of("a").tiers.drained
    cluster.tell("a", published=(PublishedSave(name="step-10", attempt=1, format="dcp", step=10),))
    cluster.work_out()
    assert not cluster.of("a").tiers.commit
    assert cluster.of("a").tiers.drained


def test_at_the_end_no_node_leaves_before_all_have_told_their_last_save(cluster: Cluster) -> None:
    cluster.save(10)
    cluster.tell("a", published=(PublishedSave(name="step-10", attempt=1, format="dcp", step=10),))
    cluster.work_out()
    assert cluster.of("a").tiers.drained
    cluster.driver.order("stop")
    assert not cluster.of("a").tiers.drained
    cluster.tell("a", rested=1)
    cluster.tell("b", rested=1, parts=(part("b", 20), part("b", 10)))
    cluster.work_out()
    assert cluster.of("b").tiers.drained, "node a has no part of step 20: it will never be whole"


def test_what_a_node_leaves_unpublished_at_the_end_another_one_publishes(cluster: Cluster) -> None:
    cluster.save(10)
    cluster.driver.order("stop")
    for node in "ab":
        cluster.tell(node, rested=1, staged=(("step-10", 1, 0),))
    cluster.work_out()
    assert cluster.of("a").tiers.commit
    cluster.driver.tell(m.NodeDone, node="a")
    assert cluster.of("b").tiers.commit


def test_the_view_says_where_checkpoints_are(cluster: Cluster) -> None:
    cluster.save(10)
    view = cluster.driver.job.view()
    assert [(one.path, one.where) for one in view.checkpoints] == [(f"{HERE}/step-10", ("local", "mirrored"))]
    assert [(one.tier, one.step) for one in view.tiers] == [("local", 10), ("mirrored", 10)]


def test_the_view_says_what_the_loss_of_a_node_would_cost(cluster: Cluster) -> None:
    cluster.save(10)
    assert cluster.driver.job.view().restart.after_node_loss is None
    cluster.save(10, 20, mirrored=False)
    cluster.driver.tell(m.CheckpointsSeen, node="a", checkpoints=(checkpoint(20), checkpoint(10)), folders=(HERE,))
    restart = cluster.driver.job.view().restart
    assert (restart.step, restart.after_node_loss.step) == (20, 10)


def test_a_requeued_job_has_what_was_published(cluster: Cluster) -> None:
    cluster.save(10)
    cluster.tell("a", published=(PublishedSave(name="step-10", attempt=1, format="dcp", step=10),))
    cluster.work_out()
    cluster.driver.order("stop")
    cluster.driver.tell(m.JobRequeued, requeues=1)
    cluster.driver.tell(m.JobDefined, spec=cluster.driver.job.spec)
    cluster.driver.join("x", "y")
    if "gather" in cluster.driver.job.timers:
        cluster.driver.fire("gather")
    order = cluster.of("x")
    assert order.resume.path == f"{HERE}/step-10"
    assert order.tiers.bring.published


def test_a_replay_decides_the_same(cluster: Cluster) -> None:
    cluster.save(10, 20)
    cluster.lose("b")
    cluster.rest("a", "c")
    assert cluster.driver.replayed().view() == cluster.driver.job.view()


def test_without_a_folder_to_publish_to_nothing_is_asked_for(make_driver: Any) -> None:
    driver = make_driver(checkpoint_dirs=(HERE,))
    driver.join("a")
    driver.tell(m.TiersSeen, node="a", tiers=NodeTiers(parts=(part("a", 10),)))
    assert driver.told["a"].tiers is None
    assert "tiers" not in driver.job.timers
    assert driver.job.view().checkpoints == ()


# ----- what a rollback, or a look into the content, took out of use -----


def checkpoint(step: int, **more: Any) -> Checkpoint:
    """As one node sees its part."""
    return Checkpoint(
        **{"path": f"{HERE}/step-{step}", "step": step, "format": "dcp", "complete": False, "modified_at": 1.0, **more}
    )


def published(*steps: int) -> tuple[PublishedSave, ...]:
    return tuple(PublishedSave(name=f"step-{step}", attempt=1, format="dcp", step=step) for step in steps)


def roll_back(cluster: Cluster, step: int) -> None:
    """Everything is mirrored and published; the nodes move their own parts aside, and the next attempt runs."""
    cluster.tell("a", published=published(10, 20))
    cluster.work_out()
    cluster.driver.order("rollback", str(step))
    cluster.rest("a", "b", "c")
    assert cluster.of("a").resume.step == step
    for node in "ab":
        cluster.tell(node, parts=(part(node, step),))
    cluster.work_out()
    cluster.driver.up()


def test_what_other_jobs_have_left_and_who_is_gone_is_told(cluster: Cluster) -> None:
    cluster.save(10)
    cluster.tell("b", others=2, others_bytes=7)
    (left,) = cluster.driver.job.view().left
    assert (left.node, left.path, left.jobs, left.size_bytes) == ("b", f"{HERE}/.unbroken-mirrors", 2, 7)
    assert cluster.of("a").tiers.gone == ()
    cluster.lose("b")
    assert cluster.of("a").tiers.gone == ("b",)


def test_what_a_rollback_moved_aside_is_not_brought_back_later(cluster: Cluster) -> None:
    cluster.save(10, 20)
    roll_back(cluster, 10)
    cluster.driver.crash("a", 1)
    cluster.rest("a", "b", "c")
    assert cluster.of("a").resume.step == 10
    assert cluster.of("a").tiers.bring.save.name == "step-10"
    for node in "abc":
        cluster.tell(node, mirrors=())
    cluster.work_out()
    assert cluster.of("a").resume.step == 10, "only the published one is left of it"


def test_every_node_gets_back_what_a_rollback_moved(cluster: Cluster) -> None:
    cluster.save(10, 20)
    roll_back(cluster, 10)
    cluster.driver.order("rollback", "--undo")
    cluster.rest("a", "b", "c")
    for node in "ab":
        order = cluster.of(node)
        assert order.prepare == (PutBack(path=f"{HERE}/step-20"),)
        assert (order.resume.step, order.tiers.bring.save.name) == (20, "step-20")


def test_what_is_out_of_use_is_not_published(cluster: Cluster) -> None:
    cluster.save(10, 20)
    cluster.tell("a", published=published(10))
    cluster.work_out()
    cluster.driver.order("rollback", "10")
    for node in "ab":
        cluster.tell(node, staged=(("step-20", 1, 0),))
    cluster.work_out()
    assert not any(cluster.of(node).tiers.commit for node in "abc")
    assert cluster.of("a").tiers.drained, "nobody waits for it"


@pytest.mark.parametrize("bad", [{"changed": True}, {"complete": True, "suspect": True}])
def test_what_a_node_has_found_bad_is_not_published(cluster: Cluster, bad: dict[str, bool]) -> None:
    cluster.save(10, 20)
    cluster.driver.tell(m.CheckpointsSeen, node="b", checkpoints=(checkpoint(20, **bad),), folders=(HERE,))
    for node in "ab":
        cluster.tell(node, staged=(("step-20", 1, 0), ("step-10", 1, 0)))
    cluster.work_out()
    assert [save.name for node in "ab" for save in cluster.of(node).tiers.commit] == ["step-10"]
    cluster.driver.crash("a", 1)
    cluster.rest("a", "b")
    assert cluster.of("a").resume.step == 10


def test_a_node_that_still_writes_its_part_is_waited_for(cluster: Cluster) -> None:
    """No file of the format names what others wrote, and the disk of node b is slow."""

    def of(node: str) -> SavePart:
        files = (PartFile(name=f"step_20/rank_{'ab'.index(node)}.pt", size=10),)
        return SavePart(name="step_20", owner=node, attempt=1, format="folder", step=20, files=files, whole=True)

    cluster.tell("b", writing=("step_20",))
    cluster.tell("a", parts=(of("a"),), staged=(("step_20", 1, 0),))
    for _ in range(3):
        cluster.driver.now += SETTLE_S
        cluster.tell("c")
        cluster.work_out()
    assert cluster.of("a").tiers.commit == ()
    cluster.tell("b", writing=(), parts=(of("b"),))
    cluster.work_out()
    assert cluster.of("a").tiers.commit == (), "its part is not staged"
    cluster.tell("b", staged=(("step_20", 1, 0),))
    cluster.work_out()
    (save,) = cluster.of("a").tiers.commit
    assert save.owners == ("a", "b")


def test_at_the_end_of_the_job_nodes_that_have_left_have_lost_nothing(cluster: Cluster) -> None:
    cluster.save(10, mirrored=False)
    cluster.driver.finish()
    for node in "ab":
        cluster.driver.tell(m.LauncherEnded, node=node, attempt=1, how="", code=0)
    assert cluster.driver.job.is_over
    cluster.rest("a", "b")
    cluster.driver.tell(m.NodeDone, node="b")
    cluster.driver.tell(m.NodeLost, node="b", silent_s=30.0)
    (found,) = cluster.driver.job.tiers.judged(())
    assert (found.path, found.complete, found.why) == (f"{HERE}/step-10", True, "")
