"""What is not the same on all nodes, in words and once."""

from supervisor.node_diff import DIFFERENCES, NODES_NAMED, SETTLE_S, NodeDiffMonitor, compare


def nodes(**versions: str) -> dict[str, dict[str, str]]:
    return {node: {"driver": version} for node, version in versions.items()}


def texts(inventories: dict[str, dict[str, str]]) -> list[str]:
    return [difference.text for difference in compare(inventories)]


def test_many_nodes_are_not_all_named() -> None:
    fleet = nodes(**{f"n{i:02}": "1" for i in range(20)}, **{f"x{i:02}": "2" for i in range(30)})
    (text,) = texts(fleet)
    assert text.count(",") == NODES_NAMED - 1
    assert "and 12 more" in text
    assert "2 on the other 30" in text


def test_a_key_that_a_node_does_not_have_is_no_difference() -> None:
    assert compare({"a": {"driver": "1", "kernel": "6.8"}, "b": {"kernel": "6.8"}, "c": {}}) == ()
    assert compare({}) == ()


def test_sizes_may_differ_a_little() -> None:
    assert compare({"a": {"memory_gib": "2015"}, "b": {"memory_gib": "2016"}, "c": {"memory_gib": "2014"}}) == ()
    assert texts({"a": {"memory_gib": "2015"}, "b": {"memory_gib": "2014"}, "c": {"memory_gib": "1890"}}) == [
        "memory_gib is 1890 on c and 2014 on the other 2"
    ]


def test_hostile_inventories_are_bounded() -> None:
    monitor = NodeDiffMonitor()
    for node in ("a", "b"):
        monitor.record(node, {f"k{i}\x1b[31m": node * 10_000 + "\n" for i in range(1000)}, 0.0)
    found = monitor.changes(["a", "b"])
    assert found is not None
    assert len(found) == DIFFERENCES
    assert all(len(one.text) < 1000 and "\x1b" not in one.text and "\n" not in one.text for one in found)


def test_it_waits_until_the_nodes_are_there_and_reports_changes_only() -> None:
    monitor = NodeDiffMonitor()
    present = ["a", "b", "c"]
    for at, node in enumerate(present):
        monitor.record(node, {"driver": "2" if node == "b" else "1"}, float(at))
    assert not monitor.is_due(SETTLE_S + 1.9)
    assert monitor.is_due(SETTLE_S + 2.0)
    reported = monitor.changes(present)
    assert not monitor.is_due(SETTLE_S + 2.0)
    assert reported is not None
    assert reported[0].text == "driver is 2 on b and 1 on the other 2"
    monitor.record("b", {"driver": "2"}, 20.0)  # a new connection: nothing new
    assert not monitor.is_due(100.0)
    monitor.recheck(100.0)
    assert monitor.is_due(110.0)
    assert monitor.changes(["a", "c"]) == ()
    assert monitor.changes(present) == reported
    assert monitor.changes(present) is None


def test_important_keys_come_first() -> None:
    keys = ("bios", "driver", "governor", "kernel", "nccl", "thp")
    found = compare({"a": dict.fromkeys(keys, "1"), "b": dict.fromkeys(keys, "2")})
    assert [one.key for one in found] == ["driver", "nccl", "kernel", "bios", "governor", "thp"]
    assert [one.important for one in found] == [True] * 3 + [False] * 3
