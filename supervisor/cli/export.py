"""`unbroken export incidents`: past incidents as JSON Lines, with Croissant metadata that says what each field is.

A line also is a case of `python -m tests.bench diagnosis`: `id`, `label` (the truth, as far as it is known), `log`.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
import msgspec

from diagnosis.taxonomy import FailureClass
from recovery.incident_memory import ClosedIncident
from supervisor import config
from supervisor.cli.nodes import answered
from supervisor.cli.output import print_answer, warn
from supervisor.errors import UnbrokenError
from supervisor.paths import JOBS
from supervisor.view import utc

if TYPE_CHECKING:
    from recovery.anonymize import Anonymizer

DATA, ABOUT = "incidents.jsonl", "croissant.json"
SALT_BYTES: Final = 32
FIELDS: Final = {
    "id": ("sc:Text", "the job's pseudonym or id, and the incident's"),
    "label": ("sc:Text", "the failure class: an operator's word where there is one, else the verdict's"),
    "corrected": ("sc:Boolean", "an operator has said what it was"),
    "log": ("sc:Text", "the lines of evidence, the most telling first"),
    "verdict": ("sc:Text", "the class that the diagnoser gave; empty: none"),
    "confidence": ("sc:Float", "of the verdict, 0 to 1"),
    "why": ("sc:Text", "the verdict in a sentence"),
    "action": ("sc:Text", "what the verdict asks for"),
    "job": ("sc:Text", "the job's name"),
    "opened_at": ("sc:Float", "Unix time"),
    "closed_at": ("sc:Float", "Unix time"),
    "attempt": ("sc:Integer", "which start of all ranks broke"),
    "step": ("sc:Integer", "the newest training step; -1: none is known"),
    "trigger": ("sc:Text", "what opened it"),
    "what": ("sc:Text", "what was seen first"),
    "nodes": ("sc:Text", "culprits, with commas"),
    "gpus": ("sc:Text", "culprits, with commas"),
    "ranks": ("sc:Text", "culprits, with commas"),
    "fingerprint": ("sc:Text", "the same for evidence that says the same"),
    "plan": ("sc:Text", "what was to be done, and why"),
    "cordoned": ("sc:Text", "nodes that were taken out of use, with commas"),
    "outcome": ("sc:Text", "how it was closed"),
    "lost_s": ("sc:Float", "seconds of training that it cost"),
    "notes": ("sc:Text", "what operators wrote with their corrections"),
    "corrected_by": ("sc:Text", "who corrected it last"),
}
"""Field -> its type in Croissant, and what it is."""
_CLASSES: Final = frozenset(one.value for one in FailureClass)


@click.group()
def export() -> None:
    """Write past incidents to files."""


@export.command()
@click.option("--anonymize", is_flag=True, help="Replace hosts, users, paths, addresses, ids, job names and secrets.")
@click.option("-o", "--output", default="incidents-export", metavar="DIR", help="A new folder.  [incidents-export]")
@click.option("--folder", default="", help="Where the incidents are.  [`ledger.folder`, else unbroken-jobs]")
@click.option("--corrected", is_flag=True, help="Only those of which an operator has said what they were.")
@click.option("--salt-file", default="", help="Keep the key of the pseudonyms here, for more exports. Keep it secret.")
@click.option("--json", "as_json", is_flag=True, help="JSON, documented in docs/protocol.md.")
def incidents(anonymize: bool, output: str, folder: str, corrected: bool, salt_file: str, as_json: bool) -> None:
    """Write the past incidents to DIR, for others: incidents.jsonl, and croissant.json about it.

    Read the result before you give it away: a name that looks like any other word is not recognized
    (docs/incident-memory.md).
    """
    from recovery.incident_store import IncidentStore

    if salt_file and not anonymize:
        raise click.UsageError("--salt-file goes with --anonymize")
    ledger = config.load_here().settings.ledger.folder
    store = IncidentStore(config.working_folder() / (folder or ledger or JOBS))
    found = answered(lambda: store.all(corrected_only=corrected), store.folder, "the memory of incidents")
    if not found:
        raise UnbrokenError(f"there is no {'corrected ' * corrected}incident in {store.path}. Nothing was written.")
    if anonymize:
        rows = anonymized(found, _salt(salt_file))
    else:
        warn("hosts, users, paths and job names are in it as they are: for others use --anonymize")
        rows = [row_of(one) for one in found]
    where = config.working_folder() / output
    data = b"".join(msgspec.json.encode(row) + b"\n" for row in rows)
    about = croissant(data, len(rows), anonymize, time.time())
    try:
        where.mkdir(parents=True, exist_ok=True)
        for name, content in ((DATA, data), (ABOUT, msgspec.json.format(msgspec.json.encode(about), indent=2) + b"\n")):
            with open(where / name, "xb") as file:
                file.write(content)
    except OSError as error:
        why = "it is there already" if isinstance(error, FileExistsError) else error.strerror
        raise UnbrokenError(f"{error.filename or where}: {why}. Name another folder with -o.") from None
    answer = {"schema": 1, "folder": str(where), "incidents": len(rows), "anonymized": anonymize}
    print_answer(answer, as_json, lambda _: click.echo(f"incidents: {len(rows)}, in {where}: {DATA}, {ABOUT}"))


def _salt(name: str) -> bytes:
    """Of a file, which is made where there is none; else one that nobody keeps."""
    if not name:
        return secrets.token_bytes(SALT_BYTES)
    try:
        try:
            descriptor = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        except FileExistsError:
            found = Path(name).read_bytes()[:4096]
            if len(found) < SALT_BYTES:
                raise UnbrokenError(f"{name}: it has no {SALT_BYTES} bytes, and is no salt of ours") from None
            return found
        with open(descriptor, "wb") as file:
            file.write(salt := secrets.token_bytes(SALT_BYTES))
        return salt
    except OSError as error:
        raise UnbrokenError(f"{name}: {error.strerror}. Nothing was written.") from None


def row_of(one: ClosedIncident) -> dict[str, Any]:
    """As it is: a row of the file."""
    row = {
        "id": f"{one.job_id}/{one.incident}",
        "label": one.truth if one.truth in _CLASSES else FailureClass.UNKNOWN.value,
        "corrected": bool(one.corrections),
        "log": "\n".join(one.evidence) or one.why or one.what,
        "verdict": one.failure_class,
        "closed_at": one.opened_at if one.closed_at is None else one.closed_at,
        "step": -1 if one.step is None else one.step,
        "notes": "\n".join(each.note for each in one.corrections if each.note),
        "corrected_by": one.corrections[-1].by if one.corrections else "",
    }
    row |= {name: ", ".join(map(str, getattr(one, name))) for name in ("nodes", "gpus", "ranks", "cordoned")}
    return {name: row[name] if name in row else getattr(one, name) for name in FIELDS}


def anonymized(found: Iterable[ClosedIncident], salt: bytes) -> list[dict[str, Any]]:
    """All of them are read for names first: what is one in one incident is one in all."""
    from recovery.anonymize import Anonymizer  # only who exports pays for it

    hide, found = Anonymizer(salt), list(found)
    for one in found:
        for text in (one.what, one.why, *one.evidence, one.plan, one.outcome, *(each.note for each in one.corrections)):
            hide.learn(text)
        for node in (*one.nodes, *one.cordoned, *(gpu.partition("/")[0] for gpu in one.gpus if "/" in gpu)):
            hide.know("host", node, sure=True)
        hide.know("job", one.job, sure=True)
        for each in one.corrections:
            user, _, host = each.by.partition("@")
            hide.know("user", user.partition(" ")[0], sure=True)
            hide.know("host", host, sure=True)
    return [_hidden(one, hide) for one in found]


def _hidden(one: ClosedIncident, hide: Anonymizer) -> dict[str, Any]:
    def gpu(name: str) -> str:
        node, mark, address = name.partition("/")
        return f"{hide.name('host', node)}/{hide.text(address)}" if mark else hide.name("id", name)

    def closed_list(word: str) -> str:
        return word if word in _CLASSES or word in _WORDS else hide.text(word)

    changed = msgspec.structs.replace(
        one,
        job=hide.name("job", one.job),
        job_id=hide.name("job", one.job_id),
        incident=hide.text(one.incident),
        trigger=closed_list(one.trigger),
        action=closed_list(one.action),
        failure_class=closed_list(one.failure_class),
        nodes=tuple(hide.name("host", each) for each in one.nodes),
        cordoned=tuple(hide.name("host", each) for each in one.cordoned),
        gpus=tuple(map(gpu, one.gpus)),
        fingerprint=hide.name("id", one.fingerprint),
        evidence=tuple(map(hide.text, one.evidence)),
        corrections=tuple(
            msgspec.structs.replace(each, by=hide.name("user", each.by), note=hide.text(each.note), uid=None)
            for each in one.corrections
        ),
        **{name: hide.text(getattr(one, name)) for name in ("what", "why", "plan", "outcome")},
    )
    return row_of(changed)


_WORDS: Final = frozenset(
    "exit hang node_lost launcher signal setup device loss replicas swap logs none restart restart_excluding hold stop "
    "rollback_and_restart cordon_gpu_and_restart cordon_node_and_restart wait_and_retry requeue".split()
)


# ----- Croissant: JSON-LD about a data set, as MLCommons publishes it -----

_OF_CROISSANT: Final = (
    "citeAs column equivalentProperty extract field fileProperty fileObject fileSet format includes isLiveDataset "
    "jsonPath key md5 parentField path recordSet references regex repeated replace samplingRate separator "
    "source subField transform"
).split()
CONTEXT: Final[dict[str, Any]] = {
    "@language": "en",
    "@vocab": "https://schema.org/",
    "cr": "http://mlcommons.org/croissant/",
    "rai": "http://mlcommons.org/croissant/RAI/",
    "dct": "http://purl.org/dc/terms/",
    "sc": "https://schema.org/",
    "conformsTo": "dct:conformsTo",
    "data": {"@id": "cr:data", "@type": "@json"},
    "dataType": {"@id": "cr:dataType", "@type": "@vocab"},
    "examples": {"@id": "cr:examples", "@type": "@json"},
    **{name: f"cr:{name}" for name in _OF_CROISSANT},
}


def croissant(data: bytes, incidents: int, anonymize: bool, now: float) -> dict[str, Any]:
    """About the file, whose content is `data`."""
    how = "Names are replaced by pseudonyms." if anonymize else "Names are as they were."
    source = {"@id": DATA}
    return {
        "@context": CONTEXT,
        "@type": "sc:Dataset",
        "name": "unbroken-incidents",
        "description": f"{incidents} incidents of training jobs, with evidence, verdict, action and outcome. {how}",
        "conformsTo": "http://mlcommons.org/croissant/1.0",
        "license": "Not stated: whoever exported it decides.",
        "datePublished": f"{utc(now):%Y-%m-%d}",
        "version": "1.0.0",
        "distribution": [
            {
                "@type": "cr:FileObject",
                "@id": DATA,
                "name": DATA,
                "contentUrl": DATA,
                "contentSize": f"{len(data)} B",
                "encodingFormat": "application/jsonlines",
                "sha256": hashlib.sha256(data).hexdigest(),
            }
        ],
        "recordSet": [
            {
                "@type": "cr:RecordSet",
                "@id": "incidents",
                "name": "incidents",
                "field": [
                    {
                        "@type": "cr:Field",
                        "@id": f"incidents/{name}",
                        "name": name,
                        "description": what,
                        "dataType": kind,
                        "source": {"fileObject": source, "extract": {"column": name}},
                    }
                    for name, (kind, what) in FIELDS.items()
                ],
            }
        ],
    }
