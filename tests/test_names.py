"""Names that a newcomer finds: a public class has one home, a file name at most two, and words of the field are used.

Some words were this project's own. They are listed with the field's word, so that they do not come back.
"""

from __future__ import annotations

import ast
import builtins
import functools
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import IMPORTED

REPOSITORY = Path(__file__).parents[1]
MODULES = sorted(path for top in ("diagnosis", "recovery", "supervisor") for path in (REPOSITORY / top).rglob("*.py"))
OURS = [path for path in MODULES if "training" not in path.parts]
"""`supervisor/training` runs inside of the user's processes and has its own words."""

FIELD_WORDS = {
    "bell": "wakeup",
    "casebook": "incidents",
    "casework": "incident handling",
    "dealings": "scheduler requests",
    "deeds": "node actions",
    "desk": "launcher socket",
    "ears": "stdin",
    "errands": "executor",
    "headless": "orphan",
    "hearsay": "unconfirmed",
    "lookout": "probe thread",
    "meetings": "collective timeline",
    "mouth": "line writer",
    "notebook": "agent state",
    "oddity": "anomaly",
    "overdue": "timed out",
    "oversight": "operator commands",
    "safekeeping": "quarantine",
    "slowness": "slowdown",
    "standings": "check state",
    "station": "probe worker",
    "stations": "probe workers",
    "told": "reported",
    "undying": "unkillable",
}
PUBLIC = {"headless", "told_at"}
"""Of messages, files and what plug-ins have: they are not renamed."""
LONGEST_FUNCTION = 70
LONGEST_MODULE = 900


@functools.cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def _classes() -> dict[str, list[str]]:
    homes = defaultdict(list)
    for path in MODULES:
        for node in _tree(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes[node.name].append(str(path.relative_to(REPOSITORY)))
    return homes


def _defined(tree: ast.Module) -> Iterator[str]:
    """Classes, functions, and what is assigned at the top of the module or of a class."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node.name
        if isinstance(node, (ast.Module, ast.ClassDef)):
            for statement in node.body:
                targets = statement.targets if isinstance(statement, ast.Assign) else []
                targets += [statement.target] if isinstance(statement, ast.AnnAssign) else []
                yield from (target.id for target in targets if isinstance(target, ast.Name))


def _words(identifier: str) -> set[str]:
    return {word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", identifier)}


def test_a_public_class_has_one_home() -> None:
    several = {name: homes for name, homes in _classes().items() if len(homes) > 1}
    assert several == {}


def test_a_file_name_is_used_at_most_twice() -> None:
    homes = defaultdict(list)
    for path in MODULES:
        if path.name != "__init__.py":
            homes[path.name].append(str(path.relative_to(REPOSITORY)))
    assert {name: paths for name, paths in homes.items() if len(paths) > 2} == {}


def test_identifiers_are_the_fields_words() -> None:
    private = {
        f"{path.relative_to(REPOSITORY)}: {name}": FIELD_WORDS[word]
        for path in OURS
        for name in sorted({path.stem, *_defined(_tree(path))} - PUBLIC)
        for word in _words(name) & FIELD_WORDS.keys()
    }
    assert private == {}, "name: the word that the field uses"


def test_every_error_is_in_the_tree() -> None:
    """`supervisor/errors.py` draws it: what a person is told, and what the program handles itself."""
    roots = {"UnbrokenError", "InternalError"}
    ours = [node for path in OURS if "supervisor" in path.parts for node in _tree(path).body]
    classes = [node for node in ours if isinstance(node, ast.ClassDef)]
    bases = {node.name: {base.id for base in node.bases if isinstance(base, ast.Name)} for node in classes}
    standard = {name for name in vars(builtins) if name.endswith(("Error", "Exception"))}
    alone = {name for name, of in bases.items() if of & standard and not of & roots and not name.startswith("_")}
    assert alone == roots | {"CannotAnswer"}, "CannotAnswer: of a program that runs in the training environment"


def test_functions_can_be_read_at_once() -> None:
    long = {
        f"{path.relative_to(REPOSITORY)}:{node.lineno} {node.name}": length
        for path in MODULES
        for node in ast.walk(_tree(path))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        and (length := (node.end_lineno or 0) - node.lineno + 1) > LONGEST_FUNCTION
    }
    assert long == {}


def test_modules_are_one_concept() -> None:
    """Over 900 lines a module needs a reason: it is written here."""
    reasons = {
        "supervisor/controller/journal.py",  # the format, the file, its repair, and the thread that writes it
        "supervisor/messages.py",  # all that travels between the processes, or is in the journal
        "supervisor/job/job.py",  # the states, the three tables of who handles what, and what concerns several parts
        "supervisor/job/incidents.py",  # one story, from the first sign of a failure to the plan that is carried out
        "supervisor/job/attempts.py",  # an attempt, from its checkpoint and its nodes to its end
        "diagnosis/verdict/log_accounts.py",  # old logs as accounts: one table of rows, and what the rows ask of a log
    }
    long = {str(path.relative_to(REPOSITORY)) for path in MODULES if path.read_text().count("\n") > LONGEST_MODULE}
    assert long <= reasons


# ----- imports -----


def _name(path: Path) -> str:
    return ".".join(path.relative_to(REPOSITORY).with_suffix("").parts).removesuffix(".__init__")


def _imports(tree: ast.Module) -> Iterator[str]:
    """Modules and names that are imported when the program runs: not those for types alone."""
    todo: list[ast.AST] = [tree]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            todo.extend(node.orelse)
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        todo.extend(ast.iter_child_nodes(node))


def _graph() -> dict[str, set[str]]:
    modules = {_name(path) for path in MODULES if path.name != "__init__.py"}
    return {_name(path): modules & set(_imports(_tree(path))) - {_name(path)} for path in MODULES}


def test_no_import_circle() -> None:
    graph = _graph()
    while leaves := [name for name, needed in graph.items() if not needed & graph.keys()]:
        for name in leaves:
            del graph[name]
    assert graph == {}, "these import each other, or what does"


def test_a_small_file_has_more_than_one_user() -> None:
    """Else it is part of its user. Programs have none: what starts them names their file."""
    reasons = {
        "supervisor.training.surroundings",  # the user's processes import it by its path
    }
    graph = _graph()
    small = {_name(path) for path in MODULES if path.name != "__init__.py" and path.read_text().count("\n") < 60}
    users = {name: [user for user, needed in graph.items() if name in needed] for name in small}
    assert {name: users for name, users in users.items() if len(users) == 1}.keys() <= reasons


def test_collecting_tests_imports_nothing_that_takes_seconds(pytestconfig: pytest.Config) -> None:
    """Each worker collects all of them: `tests.conftest.Later` imports a library when a test first uses it."""
    assert pytestconfig.stash[IMPORTED] & {"torch", "transformers", "accelerate", "numpy"} == set()
