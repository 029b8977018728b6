"""Mutants of a source file: each condition negated, each effect dropped, one at a time.

Conditions: what stands in ``if``, ``while``, ``x if c else y``, in the ``if`` of a comprehension, in ``any()`` and ``all()``, and
every comparison elsewhere; of ``a and b`` both a and b. Effects: statements that only call something, assignments to
attributes and items, ``+=``, ``del``, ``raise``, ``break`` and ``continue``, and a ``return True`` or ``False``.

Left out, because there is nothing to find: logging, failpoints, asserts, what only makes up the text of an error or a message,
the first values that ``__init__`` gives, and whatever is not in a function.
"""

from __future__ import annotations

import ast
import hashlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

NEGATE, DROP, ONLY, FLIP = "negate", "drop", "only", "flip"
LOGGERS = frozenset({"log", "logger", "logging", "_log", "failpoint"})
FIRST_VALUES = frozenset({"__init__", "__post_init__"})
FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Mutant:
    """``id`` names file, function, operator and the text it is about, so other lines may come and go around it."""

    id: str
    path: str  # below ckptd/
    function: str
    line: int
    end_line: int
    text: str  # what was done
    number: int  # in its file, of this version

    @property
    def title(self) -> str:
        return f"{self.path}:{self.line} {self.text}"


Edit = Callable[[], None]


def mutants_of(path: str, source: str) -> list[Mutant]:
    """All mutants of a file; ``path``: its name below ckptd/."""
    return [mutant for mutant, _ in _Collector(path, ast.parse(source)).found]


def mutated(path: str, source: str, number: int) -> ast.Module:
    """The tree of the file with one mutant in it."""
    tree = ast.parse(source)
    _, edit = _Collector(path, tree).found[number]
    edit()
    return ast.fix_missing_locations(tree)


class _Collector:
    def __init__(self, path: str, tree: ast.Module) -> None:
        self._path = path
        self.found: list[tuple[Mutant, Edit]] = []
        self._seen: Counter[str] = Counter()
        self._function: list[str] = []
        self._statement = ""
        self._returns_bool = False
        for node in tree.body:
            self._outside(node)

    def _add(self, node: ast.AST, operator: str, snippet: ast.AST, edit: Edit) -> None:
        text = f"{operator} `{ast.unparse(snippet)}`"
        function = ".".join(self._function)
        name = f"{self._path}:{function}:{operator}"
        about = f"{name}|{self._statement}|{text}"
        self._seen[about] += 1
        digest = hashlib.blake2b(f"{about}|{self._seen[about]}".encode(), digest_size=4).hexdigest()
        line, end = getattr(node, "lineno", 0), getattr(node, "end_lineno", 0)
        mutant = Mutant(f"{name}:{digest}", self._path, function, line, end, text, len(self.found))
        self.found.append((mutant, edit))

    # --- statements ---------------------------------------------------------------------------------------------
    def _outside(self, node: ast.stmt) -> None:
        """Classes and functions; what runs at import is not looked at."""
        if isinstance(node, ast.ClassDef | FunctionNode):
            self._function.append(node.name)
            if isinstance(node, ast.ClassDef):
                for inner in node.body:
                    self._outside(inner)
            else:
                self._body_of(node)
            self._function.pop()

    def _body_of(self, node: FunctionNode) -> None:
        before = self._returns_bool
        self._returns_bool = isinstance(node.returns, ast.Name) and node.returns.id == "bool"
        self._block(node.body)
        self._returns_bool = before

    def _block(self, body: list[ast.stmt]) -> None:
        for at, statement in enumerate(body):
            self._statement = _header(statement)
            self._drops(body, at, statement)
            self._inside(statement)

    def _inside(self, statement: ast.stmt) -> None:
        if isinstance(statement, ast.Assert | ast.Raise) or is_left_out(statement):
            return
        if isinstance(statement, ast.ClassDef | FunctionNode):
            self._outside(statement)
            return
        if isinstance(statement, ast.Return) and statement.value is not None:
            self._expression(statement, "value", boolean=self._returns_bool)
        else:
            for name, value in ast.iter_fields(statement):
                if isinstance(value, ast.expr):
                    self._expression(statement, name, boolean=name == "test")
        for name in ("body", "orelse", "finalbody"):
            self._block(getattr(statement, name, []))
        for handler in getattr(statement, "handlers", []):
            self._block(handler.body)

    def _drops(self, body: list[ast.stmt], at: int, statement: ast.stmt) -> None:
        def drop() -> None:
            body[at] = ast.copy_location(ast.Pass(), statement)

        if is_left_out(statement):
            return
        if isinstance(statement, ast.Return):
            self._flip(statement)
        elif isinstance(statement, ast.Expr):
            if not isinstance(statement.value, ast.Constant):
                self._add(statement, DROP, statement, drop)
        elif isinstance(statement, ast.AugAssign | ast.Delete | ast.Raise | ast.Break | ast.Continue):
            self._add(statement, DROP, statement, drop)
        elif self._function[-1] not in FIRST_VALUES:
            if isinstance(statement, ast.Assign):
                self._assigned(body, at, statement)
            elif (
                isinstance(statement, ast.AnnAssign)
                and statement.value is not None
                and _is_state(statement.target)
            ):
                self._add(statement, DROP, statement, drop)

    def _assigned(self, body: list[ast.stmt], at: int, statement: ast.Assign) -> None:
        """Each target by itself: of ``a.x, a.y = 1, 2`` first the one, then the other."""
        for number, target in enumerate(statement.targets):
            if isinstance(target, ast.Tuple):
                for inner, part in enumerate(target.elts):
                    if _is_state(part):
                        self._add(statement, DROP, part, _renaming(target.elts, inner))
            elif _is_state(target):
                if len(statement.targets) > 1:
                    self._add(statement, DROP, target, _renaming(statement.targets, number))
                else:
                    self._add(statement, DROP, statement, _passing(body, at, statement))

    def _flip(self, statement: ast.Return) -> None:
        value = statement.value
        if isinstance(value, ast.Constant) and isinstance(value.value, bool):

            def flip() -> None:
                value.value = not value.value

            self._add(statement, FLIP, statement, flip)

    # --- expressions --------------------------------------------------------------------------------------------
    def _expression(self, parent: ast.AST, name: str, at: int | None = None, *, boolean: bool) -> None:
        node = getattr(parent, name) if at is None else getattr(parent, name)[at]
        if isinstance(node, ast.BoolOp):
            truth = boolean or any(_is_truth(value) for value in node.values)
            if not truth:
                self._only(parent, name, at, node)
            for index in range(len(node.values)):
                self._expression(node, "values", index, boolean=truth)
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            self._expression(node, "operand", boolean=True)
        elif isinstance(node, ast.JoinedStr):
            return  # the text of a message
        elif isinstance(node, ast.Constant):
            return  # `return True` is flipped
        else:
            if boolean or isinstance(node, ast.Compare):
                self._negate(parent, name, at, node)
            self._children(node)

    def _children(self, node: ast.AST) -> None:
        truth = (
            isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("any", "all")
        )
        for name, value in ast.iter_fields(node):
            if isinstance(value, ast.expr):
                self._expression(node, name, boolean=isinstance(node, ast.IfExp) and name == "test")
            elif isinstance(value, list):
                for at, item in enumerate(value):
                    if isinstance(item, ast.comprehension):
                        self._expression(item, "iter", boolean=False)
                        for index in range(len(item.ifs)):
                            self._expression(item, "ifs", index, boolean=True)
                    elif isinstance(item, ast.GeneratorExp) and truth:
                        self._expression(item, "elt", boolean=True)
                        self._children_but_elt(item)
                    elif isinstance(item, ast.expr):
                        self._expression(node, name, at, boolean=False)
                    elif isinstance(item, ast.keyword):
                        self._expression(item, "value", boolean=False)

    def _children_but_elt(self, node: ast.GeneratorExp) -> None:
        for item in node.generators:
            self._expression(item, "iter", boolean=False)
            for index in range(len(item.ifs)):
                self._expression(item, "ifs", index, boolean=True)

    def _negate(self, parent: ast.AST, name: str, at: int | None, node: ast.expr) -> None:
        def negate() -> None:
            _put(parent, name, at, ast.copy_location(ast.UnaryOp(ast.Not(), node), node))

        self._add(node, NEGATE, node, negate)

    def _only(self, parent: ast.AST, name: str, at: int | None, node: ast.BoolOp) -> None:
        """``a or b`` as a value: a alone, b alone."""
        for value in node.values:

            def only(value: ast.expr = value) -> None:
                _put(parent, name, at, value)

            self._add(node, ONLY, value, only)


def _put(parent: ast.AST, name: str, at: int | None, node: ast.expr) -> None:
    if at is None:
        setattr(parent, name, node)
    else:
        getattr(parent, name)[at] = node


def _renaming(targets: list[ast.expr], at: int) -> Edit:
    """The value goes to a local name that nobody reads."""

    def rename() -> None:
        targets[at] = ast.copy_location(ast.Name("_dropped", ast.Store()), targets[at])

    return rename


def _passing(body: list[ast.stmt], at: int, statement: ast.stmt) -> Edit:
    def put() -> None:
        body[at] = ast.copy_location(ast.Pass(), statement)

    return put


def _is_state(target: ast.expr) -> bool:
    return isinstance(target, ast.Attribute | ast.Subscript)


def _is_truth(node: ast.expr) -> bool:
    if isinstance(node, ast.BoolOp):
        return any(map(_is_truth, node.values))
    return isinstance(node, ast.Compare) or (isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not))


def is_left_out(statement: ast.stmt) -> bool:
    """Logging, failpoints, and what only the type checker reads."""
    if isinstance(statement, ast.If) and "TYPE_CHECKING" in ast.unparse(statement.test):
        return True
    if not isinstance(statement, ast.Expr) or not isinstance(statement.value, ast.Call):
        return False
    return next(_names(statement.value.func), "") in LOGGERS


def _names(node: ast.expr) -> Iterator[str]:
    while isinstance(node, ast.Attribute):
        node = node.value
    if isinstance(node, ast.Name):
        yield node.id


def _header(statement: ast.stmt) -> str:
    """The statement without the blocks in it."""
    if isinstance(statement, ast.If | ast.While):
        return f"if {ast.unparse(statement.test)}"
    if isinstance(statement, ast.For | ast.AsyncFor):
        return f"for {ast.unparse(statement.target)} in {ast.unparse(statement.iter)}"
    if isinstance(statement, ast.Try | ast.With | ast.AsyncWith | ast.ClassDef | FunctionNode):
        return type(statement).__name__
    return ast.unparse(statement)
