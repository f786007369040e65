"""Where the parts of a checkpoint lie when each node writes to its own disk, and what follows from it.

Words: a *save* is one checkpoint as the script wrote it; a *part* is what one node has of it. A part is `local` on its
node, `mirrored` on a peer's disk, and `published` in the shared folder. Pure: nodes report their parts, this module
joins them, and says which saves are whole, who has what, who mirrors whom, and in which order files become visible.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Final, Literal, NamedTuple

import msgspec

from diagnosis.signals import Frozen
from recovery.checkpoint import OF_OTHERS, POINTER, Checkpoint
from recovery.snapshot_choice import SnapshotPart

MIRRORS: Final = ".unbroken-mirrors"
"""In the folder that the script writes to: our copies of other nodes' parts, and our notes."""
PUBLISHING: Final = ".unbroken-publishing"
"""In the shared folder: what is not published yet."""
PARTS_REPORTED: Final = 4
"""Saves of one node: the newest."""
MIRRORS_KEPT: Final = 2
"""Of each node whose parts are mirrored: the newest whole ones."""
FILES_IN_SAVE: Final = 20_000
FILES_IN_PART: Final = 2_000
NAME_BYTES: Final = 1024
DEPTH: Final = 8

# ----- what nodes report -----


class PartFile(Frozen, frozen=True, kw_only=True, array_like=True):
    name: str
    """Relative to the checkpoint folder."""
    size: int


class SaveKey(NamedTuple):
    """Which save, and which version of it: a later attempt may write the same name again."""

    name: str
    attempt: int
    stamp: int


class Versioned(Frozen, frozen=True, kw_only=True):
    """Has a save's name and says which version of it."""

    name: str
    """Of the save: relative to the checkpoint folder."""
    attempt: int = 0
    """The attempt whose ranks wrote it; 0: before this job's first one on this node."""
    stamp: int = 0
    """Of a single file, which the next save may overwrite: its time in us. 0 for a folder."""

    @property
    def key(self) -> SaveKey:
        return SaveKey(self.name, self.attempt, self.stamp)


class SavePart(Versioned, frozen=True, kw_only=True):
    """What one node wrote of one save."""

    owner: str
    """The node that wrote it."""
    format: str
    step: int | None = None
    modified_at: float = 0.0
    files: tuple[PartFile, ...]
    whole: bool = False
    """Judged by itself, as a reader of the format sees it."""
    why: str = ""
    """Why it is not."""
    needs: tuple[PartFile, ...] = ()
    """What its committing file (`.metadata`) says must be there on whatever node, and the least size of each."""

    lacks: tuple[str, ...] = ()
    """Files that ranks on other nodes must have written, by the format's rules; it is whole but for them."""
    torn: str = ""
    """Why its own files are not whole, whatever others have."""
    rewritten: bool = False
    """Files that stood still were written again by the same attempt: its versions cannot be told apart."""

    @property
    def size_bytes(self) -> int:
        return sum(file.size for file in self.files)


class PublishedSave(Versioned, frozen=True, kw_only=True):
    """A save that is whole in the shared folder, by the job's own record."""

    format: str
    step: int | None = None
    modified_at: float = 0.0
    size_bytes: int = 0


class NotBrought(Versioned, frozen=True, kw_only=True):
    """A save that a node could not get."""

    why: str


class NodeTiers(Frozen, frozen=True, kw_only=True):
    """What one node has in each tier."""

    parts: tuple[SavePart, ...] = ()
    """Its own, the newest first."""
    mirrors: tuple[SavePart, ...] = ()
    """Whole copies of other nodes' parts."""
    staged: tuple[tuple[str, int, int], ...] = ()
    """Keys of its own parts that lie whole in the shared folder, not yet under their final names."""
    published: tuple[PublishedSave, ...] = ()
    failed: tuple[NotBrought, ...] = ()
    port: int = 0
    """Where its mover answers peers; 0: it does not."""
    tls: bool = False
    shared: bool = False
    """Other nodes write to the same checkpoint folder: nothing is mirrored."""
    writing: tuple[str, ...] = ()
    """Names of folders that it has a part of, not known yet, because its ranks write it. Not of DCP's, whose
    `.metadata` names all that must be there."""
    others: int = 0
    """So many other jobs have left mirrors in the same folder, unused by this one."""
    others_bytes: int = 0
    rested: int = 0
    """The newest attempt after whose end the mover looked: nothing of it will be added."""
    snapshots: tuple[SnapshotPart, ...] = ()
    """Copies in memory: of its own ranks' snapshots, and of other nodes'."""


# ----- the saves of all nodes -----

SINGLE_FILES: Final = frozenset(("torch_save", "safetensors"))


class OwnedFile(Frozen, frozen=True, kw_only=True, array_like=True):
    name: str
    size: int
    owner: str


class Save(Versioned, frozen=True, kw_only=True):
    """One save with the files of all its parts: what is committed, and what is brought back."""

    format: str
    step: int | None = None
    modified_at: float = 0.0
    files: tuple[OwnedFile, ...] = ()

    @property
    def owners(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(file.owner for file in self.files))

    @property
    def size_bytes(self) -> int:
        return sum(file.size for file in self.files)


Tier = Literal["local", "mirrored", "published"]
TIERS: Final[tuple[Tier, ...]] = ("local", "mirrored", "published")


class JoinedSave(NamedTuple):
    """A save, judged over all nodes."""

    save: Save
    whole: bool
    """All of it was written."""
    missing: str
    """What of it no node that is there has any more, in words; empty: all can be had."""
    why: str
    """Why it is not whole."""
    tiers: tuple[Tier, ...]
    """Where all of it is."""
    staged: bool
    """All parts lie in the shared folder."""
    rewritten: bool = False
    """Each save overwrites the folder: only the script can tell what belongs together."""
    open: bool = False
    """What it is may still change, or nobody can tell: it is neither offered nor moved."""
    not_brought: str = ""
    """Why a node could not get it: another one is used while that lasts."""

    @property
    def usable(self) -> bool:
        return self.whole and not self.missing and not self.rewritten


def join(
    reports: Mapping[str, NodeTiers],
    present: Set[str],
    settled: Set[SaveKey],
    open_attempts: Set[int] = frozenset(),
    closed_attempts: Set[int] = frozenset(),
) -> list[JoinedSave]:
    """The saves of all nodes, the newest first.

    `reports`: of every node that ever reported, lost ones included: what they had is known. `present`: who can give
    files now. `settled`: saves to which no node will add a part; that matters for formats whose committing file does
    not name what belongs to it. `open_attempts`: whose nodes have not told all that they have. `closed_attempts`: all
    that are there have, and a node of it is gone that has not: what it did not tell of is lost.
    """
    published = {one.key: one for report in reports.values() for one in report.published}
    variants: dict[SaveKey, dict[str, list[tuple[str, SavePart]]]] = {}
    for node, report in reports.items():
        for part in (*report.parts, *report.mirrors):
            variants.setdefault(part.key, {}).setdefault(part.owner, []).append((node, part))
    joined = [_joined(key, owners, reports, present, settled, key in published) for key, owners in variants.items()]
    joined += [_published_only(one) for key, one in published.items() if key not in variants]
    failed = _not_brought(joined, reports, present)
    joined = [
        one._replace(missing=_lost_with_their_node(one, reports, present))
        if one.why == NOT_REPORTED and one.save.attempt in closed_attempts
        else one
        for one in joined
    ]
    told = [
        one._replace(
            why=OWNER_GONE if one.why == NOT_REPORTED and one.save.attempt in closed_attempts else one.why,
            not_brought=failed.get(one.save.key, ""),
            open=one.rewritten or (not one.usable and _may_change(one, open_attempts, closed_attempts)),
        )
        for one in joined
    ]
    return sorted(told, key=lambda one: _age(one.save), reverse=True)


def _may_change(one: JoinedSave, open_attempts: Set[int], closed_attempts: Set[int]) -> bool:
    attempt = one.save.attempt
    return attempt in open_attempts or one.open or (one.why == NOT_REPORTED and attempt not in closed_attempts)


def _lost_with_their_node(one: JoinedSave, reports: Mapping[str, NodeTiers], present: Set[str]) -> str:
    """A node that is gone was seen to write this save, or wrote its part of another one of the same attempt."""
    save = one.save
    gone = [
        node
        for node, report in sorted(reports.items())
        if node not in present and node not in save.owners and _writes_parts(save, report)
    ]
    return _lost(gone)


def _writes_parts(save: Save, report: NodeTiers) -> bool:
    like = (part.attempt == save.attempt and part.format == save.format for part in report.parts)
    return save.name in report.writing or any(like)


def _lost(owners: Sequence[str]) -> str:
    return f"the part of {', '.join(owners[:4])} is lost" if owners else ""


def _not_brought(
    joined: Iterable[JoinedSave], reports: Mapping[str, NodeTiers], present: Set[str]
) -> dict[SaveKey, str]:
    """Saves that a node could not get. One that fails at several is itself at fault: it costs no other node a save."""
    usable = {one.save.key for one in joined if one.usable}
    found: dict[SaveKey, str] = {}
    for node, report in sorted(reports.items()):
        failed = {one.key: one.why for one in report.failed if one.key in usable} if node in present else {}
        if len(failed) == 1:
            found |= {key: f"{node} could not get it: {why}" for key, why in failed.items()}
    return found


NOT_REPORTED: Final = "it is not known yet whether other nodes wrote a part of it"
OWNER_GONE: Final = "a node that may have written a part of it is gone"


def _age(save: Save) -> tuple[int, int, int, float]:
    return (save.step if save.step is not None else -1, save.attempt, save.stamp, save.modified_at)


def _joined(
    key: SaveKey,
    owners: Mapping[str, list[tuple[str, SavePart]]],
    reports: Mapping[str, NodeTiers],
    present: Set[str],
    settled: Set[SaveKey],
    published: bool,
) -> JoinedSave:
    # Of one owner's part the fullest copy counts: a file that a crash has cut off is shorter than its mirror.
    best = {owner: max((part for _, part in copies), key=_fullness) for owner, copies in sorted(owners.items())}
    files: dict[str, OwnedFile] = {}
    for owner, part in best.items():
        for file in part.files:
            files.setdefault(file.name, OwnedFile(name=file.name, size=file.size, owner=owner))
    telling = max(
        best.values(), key=lambda part: (part.whole, bool(part.needs), part.step is not None, part.size_bytes)
    )
    save = Save(
        name=key.name,
        attempt=key.attempt,
        stamp=key.stamp,
        format=telling.format,
        step=telling.step,
        modified_at=max(part.modified_at for part in best.values()),
        files=tuple(files.values())[:FILES_IN_SAVE],
    )
    needs = {need.name: need.size for copies in owners.values() for _, part in copies for need in part.needs}
    why = _why_not_whole(best, files, needs, key in settled)
    had = {owner: {node for node, part in owners[owner] if part.size_bytes >= best[owner].size_bytes} for owner in best}
    gone = [] if published else [owner for owner in best if not had[owner] & present]
    tiers: list[Tier] = ["local"] if not why and all(owner in had[owner] & present for owner in best) else []
    tiers += ["mirrored"] if not why and all((had[owner] - {owner}) & present for owner in best) else []
    tiers += ["published"] if published else []
    staged = all(tuple(key) in {tuple(one) for one in reports[o].staged} for o in best if o in reports)
    return JoinedSave(
        save,
        not why or published,
        _lost(gone),
        "" if published else why,
        tuple(tiers),
        staged and all(owner in reports for owner in best),
        any(part.rewritten for copies in owners.values() for _, part in copies),
        bool(needs and why) and any(part.whole for part in best.values()),  # one node has all of it by itself
    )


def _published_only(one: PublishedSave) -> JoinedSave:
    save = Save(
        name=one.name,
        attempt=one.attempt,
        stamp=one.stamp,
        format=one.format,
        step=one.step,
        modified_at=one.modified_at,
    )
    return JoinedSave(save, True, "", "", ("published",), True)


def _fullness(part: SavePart) -> tuple[int, bool]:
    return part.size_bytes, part.whole


def _why_not_whole(
    best: Mapping[str, SavePart], files: Mapping[str, OwnedFile], needs: Mapping[str, int], is_settled: bool
) -> str:
    if needs:
        missing = sorted(name for name in needs if name not in files)
        if missing:
            return f"{missing[0]} is missing ({len(missing)} of {len(needs)} files)"
        short = sorted(name for name, size in needs.items() if files[name].size < size)
        return f"{short[0]} has {files[short[0]].size} bytes instead of {needs[short[0]]}" if short else ""
    whole = [part for part in best.values() if part.whole]
    if not whole:
        return next(iter(best.values())).why or "no node has a whole part of it"
    if torn := next((part.torn for part in best.values() if part.torn), ""):
        return torn
    if missing := sorted(name for part in whole for name in part.lacks if name not in files):
        return f"{missing[0]} is missing"
    if is_settled or any(part.format in SINGLE_FILES for part in whole):
        return ""
    return NOT_REPORTED


# ----- the choice -----


def judged(candidates: Sequence[Checkpoint], saves: Sequence[JoinedSave], folder: str) -> list[Checkpoint]:
    """The candidates as all nodes together have them: a node by itself sees its part only.

    Of one path there may be several, of several nodes: what any of them has read in its content counts. Of a name with
    several versions the newest that can be had counts. What only one node has told of yet is in doubt: neither offered
    nor touched.
    """
    by_name: dict[str, JoinedSave] = {}
    for one in sorted(saves, key=lambda one: (one.usable, one.save.attempt, one.save.stamp)):
        by_name[one.save.name] = one
    seen: dict[str, list[Checkpoint]] = {}
    for candidate in candidates:
        seen.setdefault(candidate.path, []).append(candidate)
    found = [_as_checkpoint(one, folder, seen.get(f"{folder}/{one.save.name}", ())) for one in by_name.values()]
    known = {one.path for one in found}
    for candidate in (same[0] for same in seen.values()):
        if candidate.path in known or (candidate.copy_of and candidate.copy_of in known):
            continue
        inside = candidate.path.startswith(f"{folder}/")
        doubtful = inside and not candidate.copy_of and candidate.format not in SINGLE_FILES
        if doubtful and candidate.format != POINTER:
            why = "not every node has told what it has of it"
            candidate = msgspec.structs.replace(candidate, complete=False, in_doubt=True, why=why)
        found.append(candidate)
    return found


def _as_checkpoint(one: JoinedSave, folder: str, seen: Sequence[Checkpoint]) -> Checkpoint:
    """A save with what nodes have read in their parts of it."""
    save = one.save
    changed = next((found for found in seen if found.changed), None)
    suspect = next((found for found in seen if found.suspect), None)
    contrary = not one.usable and not one.missing and any(found.complete for found in seen)
    whys = (one.missing and f"{one.missing}{OF_OTHERS}", one.why, changed and changed.why, suspect and suspect.why)
    began = [found.began_at for found in seen if found.began_at is not None]
    return Checkpoint(
        path=f"{folder}/{save.name}",
        step=save.step,
        format=save.format,
        complete=one.usable and changed is None,
        why=next((why for why in (*whys, one.not_brought) if why), ""),
        modified_at=save.modified_at,
        size_bytes=save.size_bytes,
        in_doubt=one.open or contrary or (bool(seen) and all(found.in_doubt for found in seen)),
        suspect=suspect is not None or bool(one.not_brought),
        began_at=min(began, default=None),
        layout=next((found.layout for found in seen if found.layout is not None), None),
        changed=changed is not None,
    )


class PartSource(Frozen, frozen=True, kw_only=True):
    """Who gives the part of `owner`."""

    owner: str
    node: str
    address: str
    port: int
    tls: bool = False


class SnapshotBring(Frozen, frozen=True, kw_only=True):
    """Before ranks start: have the snapshots of these ranks in this node's memory."""

    attempt: int
    step: int
    world: int
    first_rank: int
    ranks: int
    size_bytes: int
    sources: tuple[PartSource, ...] = ()


class SnapshotOrders(Frozen, frozen=True, kw_only=True):
    """What a node is asked to do with snapshots."""

    attempt: int = 0
    from_step: int = 0
    """Copy the first snapshot of this attempt that has this step or a later one."""
    first_rank: int = 0
    ranks: int = 0
    """This node's; 0: nothing is to be copied."""
    world: int = 0
    keep: tuple[tuple[int, int], ...] = ()
    """Attempts and steps of older copies that are still needed."""
    bring: SnapshotBring | None = None


class TierOrders(Frozen, frozen=True, kw_only=True):
    """What a node is asked to do with checkpoints."""

    peer: PartSource | None = None
    """Who mirrors its parts."""
    commit: tuple[Save, ...] = ()
    """Saves whose parts all lie in the shared folder: let them appear."""
    bring: BringBack | None = None
    """What every node of the next attempt must have before its ranks start."""
    gone: tuple[str, ...] = ()
    """Nodes that had parts, and are lost."""
    drained: bool = False
    """Nothing is left to be published: at the end nobody waits."""
    snapshots: SnapshotOrders | None = None
    """What is asked of it for snapshots in memory; None: they are not mirrored."""


class BringBack(Frozen, frozen=True, kw_only=True):
    """Before ranks start: have all of this save in the checkpoint folder."""

    save: Save
    sources: tuple[PartSource, ...] = ()
    published: bool = False
    """What no source gives is in the shared folder."""


def bring_back(
    saves: Sequence[JoinedSave],
    name: str,
    reports: Mapping[str, NodeTiers],
    addresses: Mapping[str, str],
) -> BringBack | None:
    """How nodes get what they lack of the newest usable save of that name; None: there is none.

    `addresses`: of the nodes that are there. Every node gets all files: DCP writes a tensor that several ranks have
    only once, in any rank's file, so no node can do without the others'.
    """
    usable = [one for one in saves if one.usable and one.save.name == name]
    chosen = max(usable, key=lambda one: (one.save.attempt, one.save.stamp), default=None)
    if chosen is None or any(report.shared for node, report in reports.items() if node in addresses):
        return None  # a node sees all of a shared folder: to bring would be to take it from the others
    sources = [
        PartSource(owner=part.owner, node=node, address=addresses[node], port=report.port, tls=report.tls)
        for node, report in sorted(reports.items())
        if node in addresses and report.port
        for part in (*report.parts, *report.mirrors)
        if part.key == chosen.save.key
    ]
    sources.sort(key=lambda source: (source.owner, source.node != source.owner))
    return BringBack(save=chosen.save, sources=tuple(sources), published="published" in chosen.tiers)


# ----- who mirrors for whom -----


class NodePlace(NamedTuple):
    """A node, and where it stands."""

    node: str
    host: str
    domain: str = ""
    """What fails together: a rack, a switch; empty: not known."""


def choose_peers(places: Sequence[NodePlace], present: Set[str]) -> dict[str, str]:
    """Node -> the node that mirrors its parts, where there is one.

    `places`: all nodes that ever were, in a fixed order, so that the loss of one changes only who had it as a peer.
    The search begins half way round the ring, because neighbours share racks and parallel groups, and prefers another
    domain, then another host.
    """
    count = len(places)
    peers: dict[str, str] = {}
    for at, own in enumerate(places):
        if own.node not in present:
            continue
        ring = [places[(at + count // 2 + turn) % count] for turn in range(count)]
        others = [other for other in ring if other.node != own.node and other.node in present]
        best = min(others, key=lambda other: _closeness(own, other), default=None)  # the first of the least close
        if best is not None:
            peers[own.node] = best.node
    return peers


def _closeness(own: NodePlace, other: NodePlace) -> int:
    if own.host == other.host:
        return 2
    return 1 if own.domain and own.domain == other.domain else 0


def mirrors_to_drop(held: Iterable[tuple[SaveKey, float]]) -> list[SaveKey]:
    """Of the whole mirrors of one owner's parts (with their times), those that are too old to be kept."""
    newest_first = sorted(held, key=lambda one: (one[0].attempt, one[1]), reverse=True)
    return [key for key, _ in newest_first[MIRRORS_KEPT:]]


# ----- in which order files become visible -----

_LAST: Final = (
    (re.compile(r".*\.index\.json"), 1),
    (re.compile(r"common\.pt|metadata\.json"), 2),
    (re.compile(r"\.metadata|trainer_state\.json|random_states_\d+\.pkl"), 3),
)
"""Names of files that say that others are there -> how late they come; all others are 0."""
ENDS_IN_A_FILE: Final = frozenset(("dcp", "hf", "accelerate", "megatron", "deepspeed"))
"""Formats in which one file, written last, says that the folder is whole. Other folders appear all at once."""


def commit_groups(names: Iterable[str]) -> list[list[str]]:
    """Data first, then what says that the data is there: each group only when the one before is on disk."""
    groups: dict[int, list[str]] = {}
    for name in sorted(names):
        groups.setdefault(_lateness(name), []).append(name)
    return [groups[late] for late in sorted(groups)]


def _lateness(name: str) -> int:
    base = name.rpartition("/")[2]
    return next((late for pattern, late in _LAST if pattern.fullmatch(base)), 0)


class Tracker(NamedTuple):
    """A small file beside saves that names the newest one."""

    name: str
    """Relative to the checkpoint folder."""
    text: str


def tracker_of(save: Save) -> Tracker | None:
    """The tracker file as it is once this save is the newest."""
    folder, _, base = save.name.rpartition("/")
    prefix = f"{folder}/" if folder else ""
    if save.format == "megatron" and save.step is not None:
        return Tracker(f"{prefix}latest_checkpointed_iteration.txt", str(save.step))
    if save.format == "deepspeed":
        return Tracker(f"{prefix}latest", base)
    return None


# ----- names from others -----

NODE_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")


def why_bad_name(name: str) -> str:
    """Why a path from another node is not used; empty when it leads to a file of a checkpoint below our folder."""
    parts = name.split("/")
    try:
        length = len(name.encode())
    except UnicodeEncodeError:
        return "it is no text"
    if not name or length > NAME_BYTES or len(parts) > DEPTH:
        return "it is empty, too long or too deep"
    if "\0" in name or any(part in ("", ".", "..") or len(part.encode()) > 255 for part in parts):
        return "it is no plain relative path"
    if any(part.startswith(".unbroken") for part in parts):
        return "it leads into a folder of unbroken's"
    return ""


def why_bad_save(save: Save | SavePart) -> str:
    """The same for all names of a save."""
    if why := why_bad_name(save.name):
        return f"{save.name[:80]!r}: {why}"
    if len(save.files) > FILES_IN_SAVE:
        return "it has too many files"
    for file in save.files:
        if why := why_bad_name(file.name):
            return f"{file.name[:80]!r}: {why}"
        if file.name != save.name and not file.name.startswith(f"{save.name}/"):
            return f"{file.name[:80]!r} is not part of {save.name[:80]!r}"
        if not 0 <= file.size < 1 << 50:
            return f"{file.name[:80]!r} has an impossible size"
    return ""
