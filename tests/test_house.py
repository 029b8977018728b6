"""The house keeps its order: imports point one way, the core is pure, nothing unpickles, files and functions stay short."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FILE_LINES_MAX = 500
FUNCTION_LINES_MAX = 70

# What a room of ckptd/ may import of ckptd/, beside itself, the core and the error type. recover reads what persist wrote;
# process, units, directory, identity and thread_pool are leaves: facts about a process, sizes as people write them, directories
# that outlive a power cut, who this node is, threads that nobody waits for without bound.
ROOMS: dict[str, frozenset[str]] = {
    "core": frozenset(),
    "wire": frozenset({"process", "directory", "thread_pool"}),
    "process": frozenset(),
    "units": frozenset(),
    "choices": frozenset(),
    "thread_pool": frozenset(),
    "arena": frozenset({"process", "units", "thread_pool"}),
    "observe": frozenset({"thread_pool"}),
    "protect": frozenset({"arena", "wire", "thread_pool"}),
    "persist": frozenset({"arena", "wire", "directory", "units", "thread_pool"}),
    "recover": frozenset({"arena", "wire", "persist", "protect", "thread_pool"}),  # from parity and from storage
    "export": frozenset({"persist", "directory", "units", "choices"}),
    "directory": frozenset(),
    "identity": frozenset({"directory"}),
    "config": frozenset({"units", "identity"}),
    "config_sources": frozenset({"config", "units"}),
    "errors": frozenset(),
    "daemon": frozenset(
        {
            "arena", "wire", "observe", "protect", "persist", "recover", "config", "process", "directory", "identity", "units",
            "thread_pool",
        }
    ),
}  # fmt: skip
# What the client packs an export unpacks, and no daemon does.
UNPACKED_BY = frozenset(
    {"ckptd_client", "ckptd_client.dtypes", "ckptd_client.integrations.dcp_names", "ckptd_client.same", "ckptd_client.tree"}
)
LIVE = ("ckptd.export.live", "ckptd_client.reader")  # one module of it reads a running job, as any process may
ALWAYS_ALLOWED = frozenset({"core", "errors"})

# What the core may use: values and arithmetic, neither clock nor I/O nor threads nor chance.
CORE_MODULES = frozenset(
    {
        "__future__",
        "abc",
        "bisect",
        "collections",
        "copy",
        "dataclasses",
        "enum",
        "functools",
        "hashlib",
        "heapq",
        "itertools",
        "statistics",
    }
    | {"math", "operator", "re", "string", "struct", "types", "typing", "weakref", "zlib", "msgpack", "numpy"}
)
IMPURE_CALLS = frozenset({"open", "print", "input", "exec", "eval", "hash", "id", "__import__"})
CORE_EXCEPTION = "ckptd/core/failpoint.py"  # tests stop processes with it; the core itself never calls it

# Files of wire/ that live in the training process (D15), and what may be imported there.
CLIENT_WIRE = frozenset(
    {"ckptd.wire.rank", "ckptd.wire.seqpacket", "ckptd.wire.memfd", "ckptd.wire.world", "ckptd.wire.names"}
)
CLIENT_PACKAGES = frozenset({"torch", "msgpack", "ckptd_client"})
# Only where the user's own state holds numpy values; and in the core, for torch has imported it by then.
CLIENT_LAZY = frozenset({"numpy"})

# The simulator's oracle shares no decision with what it judges: of ckptd it and all that it imports of the tests import names and
# messages. What is imported for annotations only is never executed.
ORACLE = "tests.sim.oracle"
ORACLE_IMPORTS = frozenset({"ckptd", "ckptd.core", "ckptd.core.ids", "ckptd.core.protocol", "ckptd.core.protocol.messages"})

EXECUTES_INPUT = frozenset(  # P13
    {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "joblib", "shelve", "marshal", "jsonpickle"}
)
UNPICKLER = "ckptd/imports/unpickle.py"  # reads other programs' pickles; nothing that they name is imported, looked up or called
ASKED = (ast.Import, ast.ImportFrom, ast.Call, ast.FunctionDef, ast.AsyncFunctionDef, ast.If)
TORCH_FILES = ("torch.load", "torch.save")
UNPICKLING = ("all_gather_object", "broadcast_object_list", "scatter_object_list", "gather_object")


def python_files(*tops: str) -> list[Path]:
    return sorted(
        path for top in tops for path in (ROOT / top).rglob("*.py") if "__pycache__" not in path.parts
    )


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path), feature_version=(3, 10))


@cache
def nodes_of(path: Path) -> tuple[ast.AST, ...]:
    """Imports, calls, functions and conditions: what these tests ask for. To walk a tree takes longer than to parse it."""
    return tuple(node for node in ast.walk(tree_of(path)) if isinstance(node, ASKED))


@cache
def module_of(path: Path) -> str:
    """Dotted name: ckptd/core/state_map/box.py -> ckptd.core.state_map.box; client/ is a source root of its own."""
    parts = list(path.relative_to(ROOT).with_suffix("").parts)
    if parts[0] == "client":
        parts = parts[1:]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def imports_of(path: Path) -> tuple[tuple[int, str], ...]:
    """(line, dotted module) of every import, wherever it stands; ``from a import b`` is a.b too when that is a file."""
    return tuple(_imports(path))


def _imports(path: Path) -> Iterator[tuple[int, str]]:
    package = module_of(path) if path.name == "__init__.py" else module_of(path).rpartition(".")[0]
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            yield node.lineno, base
            yield from (
                (node.lineno, f"{base}.{a.name}") for a in node.names if is_module(f"{base}.{a.name}")
            )


@cache
def is_module(dotted: str) -> bool:
    places = (ROOT / dotted.replace(".", "/"), ROOT / "client" / dotted.replace(".", "/"))
    return any(place.with_suffix(".py").is_file() or (place / "__init__.py").is_file() for place in places)


def room_of(dotted: str) -> str:
    """ckptd.core.state_map.box -> core; "" outside of ckptd and for the bare package."""
    parts = dotted.split(".")
    return parts[1] if parts[0] == "ckptd" and len(parts) > 1 else ""


def broken(path: Path, line: int, text: str) -> str:
    return f"{name_of(path)}:{line}: {text}"


def test_rooms_import_only_towards_the_core() -> None:
    found = []
    for path in python_files("ckptd"):
        room = room_of(module_of(path))
        if room not in ROOMS:
            continue  # cli, demo, imports, __main__: the top of the house
        allowed = ROOMS[room] | ALWAYS_ALLOWED | {room}
        for line, dotted in imports_of(path):
            target = room_of(dotted)
            if target and target not in allowed:
                found.append(broken(path, line, f"{room} imports {dotted}"))
            unpacks = (room == "export" and dotted in UNPACKED_BY) or (module_of(path), dotted) == LIVE
            if dotted.split(".")[0] in ("ckptd_client", "tests", "bench") and not unpacks:
                found.append(broken(path, line, f"{room} imports {dotted}"))
    assert not found, "\n".join(found)


def test_only_the_cli_imports_the_daemon() -> None:
    found = [
        broken(path, line, f"imports {dotted}")
        for path in python_files("ckptd", "client")
        for line, dotted in imports_of(path)
        if room_of(dotted) == "daemon" and room_of(module_of(path)) not in ("daemon", "cli", "__main__")
    ]
    assert not found, "\n".join(found)


def test_one_factory_knows_the_storage_backends() -> None:
    """Everybody else has the contract (persist/storage/base.py): a backend is added without opening another folder."""
    backends = ("posix", "posix_file", "tree", "memory", "object_store", "object_file", "object_pointer", "object_errors")
    found = [
        broken(path, line, f"imports {dotted}")
        for path in python_files("ckptd", "client")
        for line, dotted in imports_of(path)
        if dotted.startswith(tuple(f"ckptd.persist.storage.{name}" for name in backends))
        if path.parent.parts[-2:] != ("persist", "storage")
    ]
    assert not found, "\n".join(found)


def test_every_room_of_the_house_is_known() -> None:
    """A new folder must be placed in the table above before code goes into it."""
    rooms = {room_of(module_of(path)) for path in python_files("ckptd")} - {""}
    assert rooms <= set(ROOMS) | {"cli", "demo", "imports", "__main__"}


def test_core_is_pure() -> None:
    """No torch, clock, I/O, thread or chance in ckptd/core: an allow-list, so that nothing slips through."""
    found = []
    for path in python_files("ckptd/core"):
        if name_of(path) == CORE_EXCEPTION:
            continue
        for line, dotted in imports_of(path):
            top = dotted.split(".")[0]
            if top != "ckptd" and top not in CORE_MODULES:
                found.append(broken(path, line, f"imports {dotted}"))
            if dotted.startswith("ckptd.core.failpoint"):
                found.append(broken(path, line, "the core decides, it has no failpoints"))
        found += [
            broken(path, line, f"calls {call}()") for line, call in calls_of(path) if call in IMPURE_CALLS
        ]
    assert not found, "\n".join(found)


def test_client_imports_nothing_but_torch_msgpack_core_and_its_wire() -> None:
    """D15: also what it reaches through ckptd.core and ckptd.wire, packages' __init__ included."""
    found = []
    for path in client_files():
        for line, dotted in imports_of(path):
            top = dotted.split(".")[0]
            if top == "ckptd":
                fine = room_of(dotted) in ("core", "") or dotted in CLIENT_WIRE or dotted == "ckptd.wire"
                fine = fine or any(dotted.startswith(f"{module}.") for module in CLIENT_WIRE)
            else:
                fine = top in sys.stdlib_module_names or top in CLIENT_PACKAGES
                fine = fine or (path.parent.name == "integrations" and top == path.stem.partition("_")[0])  # a library's adapter
                fine = fine or (top in CLIENT_LAZY and (ROOT / "ckptd/core" in path.parents or inside_a_function(path, line)))
            if not fine:
                found.append(broken(path, line, f"imports {dotted}"))
    assert not found, "\n".join(found)


def inside_a_function(path: Path, line: int) -> bool:
    functions = (n for n in nodes_of(path) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef))
    return any(node.lineno < line <= (node.end_lineno or line) for node in functions)


def client_files() -> list[Path]:
    """The client's own and what they reach of ckptd, packages' __init__ included."""
    found: set[Path] = set()
    left = [*python_files("client"), ROOT / "ckptd/__init__.py"]
    left += [ROOT / (module.replace(".", "/") + ".py") for module in CLIENT_WIRE]
    while left:
        path = left.pop()
        found.add(path)
        for _, dotted in imports_of(path):
            parts = dotted.split(".")
            modules = [ROOT.joinpath(*parts[:count]) for count in range(1, len(parts) + 1)] if parts[0] == "ckptd" else []
            reached = [file for module in modules for file in (module.with_suffix(".py"), module / "__init__.py")]
            left += [file for file in reached if file.is_file() and file not in found]
    return sorted(found)


def test_the_oracle_imports_names_and_messages_only() -> None:
    found, seen, left = [], set(), {ORACLE}
    while left:
        seen.add(dotted := left.pop())
        path = ROOT / (dotted.replace(".", "/") + ".py")
        for line, target in imports_of(path):
            if for_annotations(path, line) or target in ("tests", "tests.sim"):
                continue
            if target.startswith("tests."):
                left |= {target} - seen if is_module(target) else set()
            elif target.split(".")[0] in ("ckptd", "ckptd_client", "bench") and target not in ORACLE_IMPORTS:
                found.append(broken(path, line, f"imports {target}"))
    assert not found, "\n".join(found)


def for_annotations(path: Path, line: int) -> bool:
    """Below ``if TYPE_CHECKING:``."""
    guards = (n for n in nodes_of(path) if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING")
    return any(node.lineno < line <= (node.end_lineno or line) for node in guards)


def test_nothing_received_is_executed() -> None:
    """P13: no module that runs what it reads, and no torch.load, in anything that ships."""
    found = []
    for path in python_files("ckptd", "client", "tests", "bench", "deploy"):
        for line, dotted in imports_of(path) if names_one(path, EXECUTES_INPUT) else ():
            if dotted.split(".")[0] in EXECUTES_INPUT and (name_of(path), dotted) != (UNPICKLER, "pickle"):
                found.append(broken(path, line, f"imports {dotted}"))
        if name_of(path).startswith(("ckptd/", "client/")):
            calls = calls_of(path) if names_one(path, (*TORCH_FILES, *UNPICKLING)) else ()
            found += [broken(path, line, f"calls {call}") for line, call in calls if unpickles(path, call)]
    assert not found, "\n".join(found)


def unpickles(path: Path, call: str) -> bool:
    """The demo makes its reference run with torch's own files; it reads no one else's. Exports write such files, and read none."""
    if call in TORCH_FILES and not (call == "torch.save" and name_of(path).startswith("ckptd/export/")):
        return not name_of(path).startswith("ckptd/demo")
    return call.endswith(UNPICKLING)


def names_one(path: Path, words: Iterable[str]) -> bool:
    """Else a look at its tree, which takes a hundred times as long, finds nothing either."""
    text = path.read_text(encoding="utf-8")
    return any(word in text for word in words)


def calls_of(path: Path) -> Iterator[tuple[int, str]]:
    for node in nodes_of(path):
        if isinstance(node, ast.Call):
            yield node.lineno, ast.unparse(node.func)


def test_tests_wait_for_conditions_not_for_seconds() -> None:
    found = []
    for path in (path for path in python_files("tests") if names_one(path, ("sleep",))):
        found += [broken(path, line, "time.sleep") for line, call in calls_of(path) if call == "time.sleep"]
        for node in nodes_of(path):
            if isinstance(node, ast.ImportFrom) and node.module == "time":
                found += [
                    broken(path, node.lineno, "time.sleep") for alias in node.names if alias.name == "sleep"
                ]
    assert not found, "\n".join(found)


def test_files_and_functions_are_short() -> None:
    found = []
    for path in python_files("ckptd", "client", "tests", "bench", "deploy"):
        lines = path.read_text(encoding="utf-8").count("\n")
        if lines > FILE_LINES_MAX:
            found.append(broken(path, lines, f"more than {FILE_LINES_MAX} lines"))
        for node in nodes_of(path):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
                length = (node.end_lineno or node.lineno) - first + 1
                if length > FUNCTION_LINES_MAX:
                    found.append(broken(path, node.lineno, f"{node.name} has {length} lines"))
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("from ckptd.daemon import server", {"ckptd.daemon", "ckptd.daemon.server"}),
        ("from . import ids", {"ckptd.core", "ckptd.core.ids"}),
        ("from ..wire.rank import Hello", {"ckptd.wire.rank"}),
        ("def f():\n    import time", {"time"}),
    ],
)
def test_the_parser_sees_every_form(source: str, expected: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A house test that overlooks imports would prove nothing."""
    path = ROOT / f"ckptd/core/imagined_{abs(hash(source))}.py"  # one for each: what was found in a file is kept
    monkeypatch.setitem(globals(), "tree_of", lambda _: ast.parse(source))
    assert {dotted for _, dotted in imports_of(path)} == expected
