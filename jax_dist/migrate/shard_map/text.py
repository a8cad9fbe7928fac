"""The text of new calls: line breaks, names with their imports, the mesh of a function."""

import ast
import dataclasses
import io
import re
import tokenize
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeAlias

from jax_dist.lint.findings import Edit
from jax_dist.lint.model.semantic_model import Module

Expression: TypeAlias = "str | Call"

_WIDTHS = {2: 80, 4: 88}  # the longest line, by the spaces of one indentation
_OPERATIONS = ast.BinOp | ast.UnaryOp | ast.BoolOp | ast.Compare | ast.IfExp | ast.Lambda
_MESH = "jax.sharding.Mesh"
HOLE = "\0"  # stands in an argument for existing text that the call is put around
_HANG = "    "  # indents the arguments of a call on lines of their own


@dataclasses.dataclass(frozen=True, slots=True)
class Call:
    """A call to be written; a tuple if its name is "", or ends with "=", as in `in_specs=`."""

    name: str
    arguments: Sequence[Expression]

    def fill(self, text: str) -> "Call":
        """Return the call with `text` in the place of its HOLE."""
        parts = [x.replace(HOLE, text) if isinstance(x, str) else x for x in self.arguments]
        return Call(self.name, parts)

    def flat(self) -> str:
        """Return the call on one line."""
        parts = [x if isinstance(x, str) else x.flat() for x in self.arguments]
        is_tuple = not self.name or self.name.endswith("=")
        comma = "," if is_tuple and len(parts) == 1 else ""
        return f"{self.name}({', '.join(parts)}{comma})"

    def lines(self, indent: str, used: int, width: int) -> str:
        """Return the call, an argument a line if it is too wide beside `used` columns of text."""
        flat, inner = self.flat(), indent + _HANG
        if "\n" not in flat and used + len(flat) <= width:
            return flat
        parts = [
            x if isinstance(x, str) else x.lines(inner, len(inner) + 1, width)
            for x in self.arguments
        ]
        rows = "".join(f"{inner}{part},\n" for part in parts)
        return f"{self.name}(\n{rows}{indent})"


class Writer:
    """Collects the edits of one file, and the imports that they need."""

    def __init__(self, module: Module):
        self.module = module
        self.edits: list[Edit] = []
        self.moved: list[Edit] = []  # changes of indentation; another edit at the place wins
        self._inserted: dict[int, list[str]] = {}
        self.imports: dict[str, None] = {}
        self.below: dict[str, None] = {}  # definitions to be put below the imports
        self._meshes: dict[tuple[ast.AST, str, str], tuple[str, list[ast.AST]]] = {}
        # By function and mesh: the name of the sharding over its axis.
        self._sharded: dict[tuple[ast.AST, str], str] = {}
        self._bound_in: dict[ast.AST, set[str]] = {}
        self.unit: str = _indentation_of(module.source.code.decode())
        self._width = _WIDTHS.get(len(self.unit), 88)
        self.bound: set[str] = {name for scope in module.scopes.all for name in scope.bindings}

    def replace(self, node: Any, text: str) -> None:
        """Put text in the place of a node."""
        self.edits.append(Edit(*self.module.span(node), text))

    def insert(self, offset: int, text: str, *, first: bool = False) -> None:
        """Insert text at an offset, behind what is inserted there already; `first`: before it."""
        texts = self._inserted.setdefault(offset, [])
        texts.insert(0 if first else len(texts), text)

    def all_edits(self) -> tuple[Edit, ...]:
        """Return all edits; the texts inserted at one offset become one edit."""
        edits = []
        inserted = {offset: [*texts] for offset, texts in self._inserted.items()}
        for edit in dict.fromkeys(self.edits):
            if edit.start == edit.end:
                inserted.setdefault(edit.start, []).append(edit.text)
            else:
                edits.append(edit)
        for edit in dict.fromkeys(self.moved):
            if not any(other.start <= edit.end and edit.start < other.end for other in edits):
                edits.append(edit)
        return (*edits, *(Edit(at, at, "".join(texts)) for at, texts in inserted.items()))

    def render(self, call: Expression, replaced: Any) -> str:
        """Return the text of a call that replaces a node, broken into lines where it stands."""
        if isinstance(call, str):
            return call
        source, (start, end) = self.module.source, self.module.span(replaced)
        after = len(source.line_text(end)) - (source.position(end).column - 1)
        used = source.position(start).column - 1 + after
        indent = indentation(source.line_text(start))
        return call.lines(indent, used, self._width)

    def define(
        self, at: ast.AST, name: str, parameters: Sequence[str], body: Iterable[Sequence[Any]]
    ) -> None:
        """Define a function above a node; `body` is [("y = ", call), ("return ", "y")]."""
        head = Call(f"def {name}", parameters)
        rows = [f"{head.lines('', len(self.indent(at)) + 1, self._width)}:"]
        for before, last in body:
            used = len(self.indent(at)) + len(self.unit) + len(before)
            text = last if isinstance(last, str) else last.lines(self.unit, used, self._width)
            rows.append(f"{self.unit}{before}{text}")
        self.above(at, [*rows, *([""] if self.indent(at) else ["", ""])])

    def put_around(self, node: Any, call: Call, inner: Any = None) -> None:
        """Edit `x` to `put(x, sharding)`; `inner` is `x`, which other edits may change too."""
        inner = inner or node
        text, outer = self.module.text(inner), call.flat()
        used = len(self.module.margins(node)[0] + outer.replace(HOLE, text))
        if "\n" in text or used > self._width:
            indent = indentation(self.module.source.line_text(self.module.span(node)[0]))
            row = f"\n{indent}{_HANG}"
            outer = f"{call.name}({''.join(f'{row}{part},' for part in call.arguments)}\n{indent})"
            self._hang(inner, len(row) - 1)
        self.around(node, inner, *outer.split(HOLE))

    def _hang(self, node: Any, depth: int) -> None:
        """Indent lines 2, 3, ... of an expression whose first line moves to column `depth`."""
        module, (start, end) = self.module, self.module.span(node)
        code, column = module.source.code, module.source.position(start).column - 1
        is_string = lambda x: isinstance(x, ast.JoinedStr | ast.Constant) and "\n" in module.text(x)
        if any(is_string(part) for part in ast.walk(node) if isinstance(part, ast.expr)):
            return
        lines = [match.end() for match in re.finditer(rb"\n *(?=\S)", code[start:end])]
        depths = [start + at - code.rfind(b"\n", 0, start + at) - 1 for at in lines]
        is_aligned = bool(depths) and min(depths) > column
        # Lines below an open parenthesis keep their place under it; others hang one step deeper.
        shift = depth - column if is_aligned else len(_HANG)
        for at in lines:
            text = " " * shift
            self.moved.append(Edit(start + at + min(shift, 0), start + at, text))

    def remove(self, statement: Any) -> None:
        """Remove a statement with its line; one that shares its line becomes `pass`."""
        if any(map(str.strip, self.module.margins(statement))):
            self.replace(statement, "pass")
        else:
            self.edits.append(self.module.line_edit(statement))

    def undecorate(self, function: Any, new_name: str) -> None:
        """Remove the first decorator of a function, and rename it."""
        decorators, start = function.decorator_list, self.module.span(function)[0]
        below = self.module.span(decorators[1])[0] - 1 if decorators[1:] else start
        self.edits.append(Edit(self._start(function), below, ""))
        name = self.module.source.code.index(function.name.encode(), start + len("def"))
        self.edits.append(Edit(name, name + len(function.name.encode()), new_name))

    def indent(self, node: ast.AST) -> str:
        """Return the indentation of the statement of a node."""
        return indentation(self.module.margins(self.module.statement(node))[0])

    def _start(self, statement: ast.stmt) -> int:
        """Return where a statement begins, with its decorators."""
        decorators = getattr(statement, "decorator_list", ())
        return (
            self.module.span(decorators[0])[0] - 1 if decorators else self.module.span(statement)[0]
        )

    def above(self, node: ast.AST, lines: Sequence[str]) -> None:
        """Insert lines above the statement of a node, with its indentation."""
        if not lines:
            return
        statement = self.module.statement(node)
        start, indent = self._start(statement), self.indent(node)
        rows = [row for line in lines for row in line.split("\n")]
        before = self.module.margins(statement)[0]
        if before.strip():  # it stands behind `def f(x):`, or behind a semicolon
            indent += self.unit * before.rstrip().endswith(":")
            text = "".join(f"\n{indent}{row}" for row in (*rows, ""))
            blank = len(before) - len(before.rstrip())
            self.edits.append(Edit(start - blank, start, text))
            return
        if rows[0].startswith("def ") and indent:
            above = start - len(indent) - 1  # the end of the line before
            last = self.module.source.line_text(above).strip()
            if last and last[-1] != ":":
                self.insert(above + 1, "\n")
        text = "\n".join(f"{indent}{row}" if row else "" for row in rows)
        self.insert(start, f"{text[len(indent) :]}\n{indent}")

    def assignment(self, name: str, call: Expression, column: int, indent: str = "") -> str:
        """Return `name = call`; its further lines begin with `indent`, the first at `column`."""
        text = call
        if isinstance(call, Call):
            text = call.lines(indent, column + len(f"{name} = "), self._width)
        return f"{name} = {text}"

    def around(self, node: Any, inner: Any, before: str = "", behind: str = "") -> None:
        """Edit `unreplicate(x)` to `before x behind`; other edits may change `inner`, the `x`."""
        (start, end), (low, high) = self.module.span(node), self.module.span(inner)
        is_operand = isinstance(
            self.module.parent(node), _OPERATIONS | ast.Attribute | ast.Subscript
        )
        if not before and is_operand and isinstance(inner, _OPERATIONS):
            before, behind = "(", ")"
        self.edits += [Edit(start, low, before), Edit(high, end, behind)]

    # --- names

    def name(self, dotted: str, at: ast.AST, short: str = "") -> str:
        """Return how to write a name of jax, and record its import; jax.sharding's as `short`."""
        text, imports = self.module.name_for(dotted, at)
        if imports == () and text.count(".") == 0:
            return text
        package, _, last = dotted.rpartition(".")
        wanted = short or last
        if package == "jax.sharding" and wanted not in self.bound and dotted != _MESH:
            alias = f" as {short}" if short else ""
            self.imports[f"from {package} import {last}{alias}"] = None
            return wanted
        self.imports |= dict.fromkeys(imports)
        return text

    def spec(self, at: ast.AST, axis: str | None) -> str:
        """Return `P()` or `P(axis)`."""
        return f"{self.name('jax.sharding.PartitionSpec', at, 'P')}({axis or ''})"

    def sharded(self, mesh: str, home: ast.AST) -> str:
        """Return the variable for `NamedSharding(mesh, P(axis))`, defined below the mesh."""
        key = home, mesh
        if key not in self._sharded:
            self._sharded[key] = self.free_name("sharded", home)
        return self._sharded[key]

    def free_name(self, wanted: str, home: ast.AST | None = None) -> str:
        """Return, and reserve, a name that is free in the file; or in the function `home` alone."""
        bound, scopes = self.bound, self.module.scopes
        if isinstance(home, ast.FunctionDef | ast.AsyncFunctionDef):
            bound = self._bound_in.setdefault(home, {*scopes.module.bindings})
            for scope in scopes.all:
                if scope.node is home or self.module.is_inside(scope.node, home):
                    bound |= {*scope.bindings}
        name, number = wanted, 2
        while name in bound:
            name, number = f"{wanted}_{number}", number + 1
        bound.add(name)
        return name

    # --- meshes

    def mesh(self, at: ast.AST, axis: str, devices: str, home: ast.AST) -> str:
        """Return the variable of the mesh that `home`, a function or the file, defines for a node.

        `axis` and `devices` are texts, such as `"batch"` with its quotes and `jax.devices()`.
        """
        key = (home, axis, devices)
        if key not in self._meshes:
            short = axis.strip("\"'")
            taken = any(mesh_home is home for mesh_home, _, _ in self._meshes)
            wanted = f"{short}_mesh" if taken and short.isidentifier() else "mesh"
            self._meshes[key] = self.free_name(wanted, home), []
        self._meshes[key][1].append(at)
        return self._meshes[key][0]

    def define_meshes(self) -> None:
        """Insert `mesh = Mesh(devices, (axis,))` above the first statement that needs a mesh."""
        for (home, axis, devices), (name, nodes) in self._meshes.items():
            body = home.body  # type: ignore[attr-defined] # a function or a module
            first = min(nodes, key=lambda node: self.module.statement(node).lineno)
            around = [first, *self.module.ancestors(first)]
            statement = next(node for node in body if any(node is outer for outer in around))
            mesh = Call(self.name(_MESH, first), [devices, f"({axis},)"])
            start = self._start(statement)
            indent = indentation(self.module.source.line_text(start))
            lines = f"{self.assignment(name, mesh, len(indent), indent)}\n{indent}"
            if (home, name) in self._sharded:
                named = self.name("jax.sharding.NamedSharding", first)
                spec = self.spec(first, axis)
                lines += f"{self._sharded[home, name]} = {named}({name}, {spec})\n{indent}"
            below = self._inserted.get(start, [self.module.source.line_text(start).strip()])[0]
            if below.startswith(("def ", "class ", "@")):
                lines = lines.removesuffix(indent) + "\n" * (1 if indent else 2) + indent
            self.insert(start, lines, first=True)

    # --- comments

    def comments(self, node: Any, kept: Iterable[Any]) -> Iterator[str]:
        """Yield the comments of a node that is replaced, but not those inside its `kept` parts."""
        start, end = self.module.span(node)
        code = self.module.source.code[start:end]
        if b"#" not in code:  # the usual case, without the cost of the tokenizer
            return
        kept_spans = [self.module.span(part) for part in kept if self.module.holds(part)]
        text = "(" + code.decode() + ")"  # so that lines of a decorator are one expression
        rows = text.splitlines(keepends=True)
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.COMMENT:
                row, column = token.start
                before = "".join((*rows[: row - 1], rows[row - 1][:column]))
                offset = start + len(before.encode()) - 1  # in the file; 1 is for "("
                if not any(first <= offset < last for first, last in kept_spans):
                    yield token.string


def indentation(line: str) -> str:
    """Return the spaces and tabs that a line begins with."""
    return line[: len(line) - len(line.lstrip())]


def _indentation_of(text: str) -> str:
    """Return the spaces of one level of indentation, as most lines of a file show it.

    >>> _indentation_of("if a:\\n  b = 1\\n")
    '  '
    """
    depths = [len(match[1]) for match in re.finditer(r"(?m)^( +)\S", text)]
    return "  " if sum(depth % 4 == 2 for depth in depths) * 5 > len(depths) else "    "
