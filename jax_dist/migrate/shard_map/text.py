"""The text of new calls: line breaks, names with their imports, the mesh of a function."""

import ast
import dataclasses
import io
import re
import textwrap
import tokenize
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

from jax_dist.lint.findings import Edit, apply_edits
from jax_dist.lint.model.semantic_model import Module

Expression: TypeAlias = "str | NewCall"

_OPERATIONS = ast.BinOp | ast.UnaryOp | ast.BoolOp | ast.Compare | ast.IfExp | ast.Lambda
_MESH = "jax.sharding.Mesh"
_DEFINITIONS = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
HOLE = "\0"  # the argument that is existing text, which the call is put around
_COMMENT = re.compile(rb"(?:^[ \t]*#.*\n)+\Z", re.MULTILINE)  # lines of it, at the end of code
_OF_PMAP = re.compile(rb"pmap|replicat|reshape", re.IGNORECASE)
_HANG = "    "  # indents the arguments of a call on lines of their own


@dataclasses.dataclass(frozen=True, slots=True)
class NewCall:
    """A call to be written; a tuple if its name is "", or ends with "=", as in `in_specs=`."""

    name: str
    arguments: Sequence[Expression]
    trailer: str = ""  # behind it, such as `(x)` of `jax.shard_map(step, ...)(x)`

    @property
    def row(self) -> str:
        """Return the arguments on one line; a tuple has at least two."""
        return ", ".join(map(str, self.arguments))

    def __str__(self) -> str:
        """Return the call on one line."""
        return f"{self.name}({self.row}){self.trailer}"


@dataclasses.dataclass(slots=True, eq=False)
class NewMesh:
    """A mesh that the new text defines: `mesh = Mesh(devices, (axis,))`."""

    variable: str
    axis: str  # code, such as `"batch"` with its quotes
    devices: str  # code, such as `jax.devices()`
    block: Any  # the function or module whose body defines it
    uses: list[ast.AST] = dataclasses.field(default_factory=list)
    # By axis, code or "" for P(): the variable of `NamedSharding(mesh, P(axis))`, where needed.
    shardings: dict[str, str] = dataclasses.field(default_factory=dict)


class Writer:
    """Collects the edits of one file, and the imports that they need."""

    def __init__(self, module: Module):
        self.module = module
        self.edits: list[Edit] = []
        self.imports: dict[str, None] = {}  # as an ordered set, as is `helpers`
        self.helpers: dict[str, None] = {}  # definitions to be put below the imports
        self.unit: str = _indentation_of(module.source.code.decode())
        self._width = 80 if len(self.unit) == 2 else 88  # of the longest line
        self._inserted: dict[int, list[str]] = {}  # texts by offset
        self._indents: list[Edit] = []  # changes of indentation; another edit at the place wins
        self._meshes: dict[tuple[ast.AST, str, str], NewMesh] = {}
        self._bound = {name for scope in module.scopes.all for name in scope.bindings}
        self._bound_in: dict[ast.AST, set[str]] = {}  # by function

    def replace(self, node: Any, text: str) -> None:
        """Put text in the place of a node."""
        self.edits.append(Edit(*self.module.span(node), text))

    def text(self, node: Any) -> str:
        """Return the text of a node with the edits that are made inside of it so far."""
        start, end = self.module.span(node)
        inside = [edit for edit in self.edits if start <= edit.start and edit.end <= end]
        edits = [Edit(x.start - start, x.end - start, x.text) for x in dict.fromkeys(inside)]
        return apply_edits(self.module.source.code[start:end], edits).decode()

    def replace_arguments(self, call: ast.Call, arguments: Sequence[Expression]) -> None:
        """Put other arguments, which have the edits inside of the old ones, into a call."""
        self.move_comments(call, [call.func, *call.args, *(x.value for x in call.keywords)])
        before, after = self.module.margins(call)
        # Of `pmap(f)(x)`, `pmap(f)` may be several lines by now: `(x)` stands behind the last.
        _, is_broken, function = self.text(call.func).rpartition("\n")
        used = len(after if is_broken else before + after)
        text = self._format(NewCall(function, arguments), indentation(before), used)
        (_, start), (_, end) = self.module.span(call.func), self.module.span(call)
        # What is in front of the arguments stays: other edits may be inside of the function.
        self.edits = [edit for edit in self.edits if not start <= edit.start < end]
        self.edits.append(Edit(start, end, text.removeprefix(function)))

    def replace_around(self, node: Any, inner: Any, before: str = "", after: str = "") -> None:
        """Edit `unreplicate(x)` to `before x after`; other edits may change `inner`, the `x`."""
        self.move_comments(node, [inner])
        (start, end), (inner_start, inner_end) = self.module.span(node), self.module.span(inner)
        outer = self.module.parent(node)
        is_operand = isinstance(outer, _OPERATIONS | ast.Attribute | ast.Subscript)
        if not before and is_operand and isinstance(inner, _OPERATIONS):
            before, after = "(", ")"
        self.edits += [Edit(start, inner_start, before), Edit(inner_end, end, after)]

    def wrap(self, node: Any, call: NewCall, inner: Any = None) -> None:
        """Edit a node to a new call, in which the code of `inner` takes the place of HOLE."""
        # `device_put(HOLE, s)` edits `replicate(x)` to `device_put(x, s)`, if `inner` is the `x`.
        inner = inner or node
        code = self.module.text(inner)
        filler = re.sub(".", HOLE, code)  # has the size of the code
        # `return a, b` and `return (a), b` have no parentheses that `f` would make a call with.
        is_call = code[0] == "(" and isinstance(ast.parse(f"f{code}", mode="eval").body, ast.Call)
        hole = f"({filler})" if isinstance(inner, ast.Tuple) and not is_call else filler
        call = NewCall(call.name, [str(x).replace(HOLE, hole) for x in call.arguments])
        before, _ = self.module.margins(node)  # what is in front of it on its line
        indent = indentation(before)
        start, _, end = self._format(call, indent, used=len(before)).partition(filler)
        if "\n" in start:
            self._reindent(inner, len(indent + _HANG))
        self.replace_around(node, inner, start, end)

    def _reindent(self, node: Any, column: int) -> None:
        """Indent lines 2, 3, ... of an expression whose first line moves to a column."""
        # Those right of the first, as below an open parenthesis, move as far; others by one step.
        module, (start, end) = self.module, self.module.span(node)
        is_text = lambda x: isinstance(x, ast.JoinedStr | ast.Constant)
        if any("\n" in module.text(x) for x in filter(is_text, ast.walk(node))):
            return  # spaces would change a text of several lines
        code, old_column = module.source.code, module.source.position(start).column - 1
        # The offsets of the first characters of these lines, and their columns.
        lines = [start + match.end() for match in re.finditer(rb"\n *(?=\S)", code[start:end])]
        columns = [offset - code.rfind(b"\n", 0, offset) - 1 for offset in lines]
        shift = column - old_column if min(columns, default=0) > old_column else len(_HANG)
        for offset in lines:  # a negative shift removes spaces in front of the offset
            self._indents.append(Edit(offset + min(shift, 0), offset, " " * shift))

    def remove(self, statement: Any) -> None:
        """Remove a statement; one that shares its line, or is alone in a block, becomes `pass`."""
        blocks = [value for _, value in ast.iter_fields(self.module.parent(statement))]
        if [statement] in blocks or any(map(str.strip, self.module.margins(statement))):
            self.replace(statement, "pass")
        else:
            self.edits.append(self.module.line_edit(statement))

    def remove_comment_above(self, node: ast.AST) -> None:
        """Remove the comment above a node's statement if it speaks of what goes with pmap."""
        line_start = self.module.line_edit(self.module.statement(node)).start
        comment = _COMMENT.search(self.module.source.code[:line_start])
        if comment and _OF_PMAP.search(comment[0]):
            self.edits.append(Edit(comment.start(), line_start, ""))

    def insert_above(self, node: Any, lines: Sequence[str], *, first: bool = False) -> None:
        """Insert lines above the statement of a node and its comments, with its indentation."""
        # Below what is inserted there already; `first`: above it.
        statement, code = self.module.statement(node), self.module.source.code
        start, indent, text = self._start(statement), self.indent(node), "\n".join(lines)
        before, _ = self.module.margins(statement)
        if head := before.strip():  # the statement stands behind `def f(x):`, or a semicolon
            indent += self.unit * head.endswith(":")
            text = f"\n{textwrap.indent(text, indent)}\n{indent}"
            self.edits.append(Edit(start - len(before) + len(before.rstrip()), start, text))
            return
        if not text.startswith("#"):
            # Not above `# %%`, `#@title` and `# cell 2`, which begin a cell of a notebook.
            comments = rf"(?m)^(?:{indent}#(?!@| ?%%| cell \d).*\n)*{indent}\Z"
            above = re.findall(comments.encode(), code[:start])[0]  # with the indentation
            start -= len(above) - len(indent)
            below = self._inserted.get(start, [])[:1] if first else []
            is_definition = any(x.startswith("def ") for x in (text, *below))
            if is_definition or isinstance(statement, _DEFINITIONS):
                text += "\n" if indent else "\n\n"
            elif first and not below and len(above) > len(indent):
                text += "\n"
        if indent and text.startswith("def ") and not re.search(rb"[:\n] *\n *\Z", code[:start]):
            self._inserted.setdefault(start - len(indent), ["\n"])  # sets a local function apart
        text = textwrap.indent(text, indent).removeprefix(indent)  # the first line has one
        texts = self._inserted.setdefault(start, [])
        texts.insert(0 if first else len(texts), f"{text}\n{indent}")

    def all_edits(self) -> tuple[Edit, ...]:
        """Return all edits of the file; the texts inserted at one offset become one edit."""
        # A change of indentation is dropped where another edit replaces the line's beginning.
        edits: list[Edit] = []
        for edit in dict.fromkeys(self.edits):  # without duplicates, in order
            if edit.start == edit.end:
                self._inserted.setdefault(edit.start, []).append(edit.text)
            else:
                edits.append(edit)
        for indent in dict.fromkeys(self._indents):
            if not any(edit.start <= indent.end and indent.start < edit.end for edit in edits):
                edits.append(indent)
        return (*edits, *(Edit(at, at, "".join(texts)) for at, texts in self._inserted.items()))

    def _format(self, expression: Expression, indent: str, used: int, column: int = 0) -> str:
        """Return the text of an expression, in the form of black if it is too wide for its line."""
        # That is all arguments on one line, or else one a line, behind each a comma. `used` columns
        # of the line hold other text; `indent` is its indentation, if the text begins at `column`.
        fits = lambda text, used: "\n" not in text and column + used + len(text) <= self._width
        if isinstance(expression, str) or fits(str(expression), used):
            return str(expression)
        parts, inner, comma = [expression.row], indent + _HANG, ""
        if not fits(expression.row, len(inner)):
            comma = "," if len(expression.arguments) > 1 else ""
            width = len(inner + comma)
            parts = [self._format(x, inner, width, column) for x in expression.arguments]
        rows = "".join(f"{inner}{part}{comma}\n" for part in parts)
        return f"{expression.name}(\n{rows}{indent}){expression.trailer}"

    def render(self, expression: Expression, replaced: Any) -> str:
        """Return the text that replaces a node: in rows if the call is too wide for its line."""
        before, after = self.module.margins(replaced)
        return self._format(expression, indentation(before), used=len(before + after))

    def assignment(self, target: str, value: Expression, column: int) -> str:
        """Return `target = value`, to be inserted at a column."""
        start = f"{target} = "
        return start + self._format(value, "", len(start), column)

    def define(self, at: ast.AST, name: str, parameters: Sequence[str], body: list[Any]) -> str:
        """Return a def, for the place of a node; `body` is [("y = ", call), ("return ", "y")]."""
        # Each line of the body is a beginning and an expression, which is broken if too long.
        column = len(self.indent(at))
        text = self._format(NewCall(f"def {name}", parameters, ":"), "", 0, column)
        for beginning, expression in body:
            row = f"{self.unit}{beginning}"
            text += f"\n{row}{self._format(expression, self.unit, len(row), column)}"
        return text

    def indent(self, node: ast.AST) -> str:
        """Return the indentation of the statement of a node."""
        return indentation(self.module.margins(self.module.statement(node))[0])

    def _start(self, statement: ast.stmt) -> int:
        """Return the offset where a statement begins, with its decorators."""
        first = [*getattr(statement, "decorator_list", ()), statement][0]
        start, sign = self.module.span(first)[0], b"" if first is statement else b"@"
        return self.module.source.code.rindex(sign, 0, start)

    def import_name(self, dotted: str, at: ast.AST, alias: str = "") -> str:
        """Return how to write "jax.jit" at a node, `jax.jit` or `jit`, and record its import."""
        # Names of jax.sharding are written short, `P` for the alias "P", as they are used often;
        # but `Mesh`, which is used once, and a name that the file binds are `jax.sharding.Mesh`.
        text, imports = self.module.name_for(dotted, at)  # by the imports of the file
        if not imports and "." not in text:  # the file imports it
            return text
        package, _, last = dotted.rpartition(".")
        name = alias or last
        if package == "jax.sharding" and name not in self._bound and dotted != _MESH:
            self.imports[f"from {package} import {last}{f' as {alias}' if alias else ''}"] = None
            return name
        self.imports |= dict.fromkeys(imports)
        return text

    def partition_spec(self, at: ast.AST, axis: str = "") -> str:
        """Return `P()`, or `P(axis)` for the code of an axis."""
        return f"{self.import_name('jax.sharding.PartitionSpec', at, 'P')}({axis})"

    def free_name(self, wanted: str, block: ast.AST | None = None) -> str:
        """Return, and reserve, a name that is free in the file; or in a function `block` alone."""
        bound, scopes = self._bound, self.module.scopes
        if isinstance(block, _DEFINITIONS):
            bound = self._bound_in.setdefault(block, {*scopes.module.bindings})
            is_inner = lambda x: x.node is block or self.module.is_inside(x.node, block)
            bound |= {name for scope in filter(is_inner, scopes.all) for name in scope.bindings}
        name, number = wanted, 2
        while name in bound:
            name, number = f"{wanted}_{number}", number + 1
        bound.add(name)
        return name

    def mesh(self, at: ast.AST, axis: str, devices: str, block: ast.AST) -> NewMesh:
        """Return the mesh of an axis and devices, for use at a node; `block` defines it once."""
        key = (block, axis, devices)
        if key not in self._meshes:
            short = axis.strip("\"'")
            is_first = all(mesh.block is not block for mesh in self._meshes.values())
            wanted = "mesh" if is_first or not short.isidentifier() else f"{short}_mesh"
            self._meshes[key] = NewMesh(self.free_name(wanted, block), axis, devices, block)
        self._meshes[key].uses.append(at)
        return self._meshes[key]

    def sharding(self, mesh: NewMesh, axis: str) -> str:
        """Return the variable for `NamedSharding(mesh, P(axis))`, to be defined below the mesh."""
        if axis not in mesh.shardings:
            mesh.shardings[axis] = self.free_name("sharded" if axis else "replicated", mesh.block)
        return mesh.shardings[axis]

    def define_meshes(self) -> None:
        """Insert `mesh = Mesh(devices, (axis,))` above the first statement that uses each mesh."""
        # Below it, `sharded = NamedSharding(mesh, P(axis))` for each sharding that is used.
        for mesh in self._meshes.values():
            first = min(mesh.uses, key=lambda node: self.module.statement(node).lineno)
            ancestors = {first, *self.module.ancestors(first)}
            statement = next(node for node in mesh.block.body if node in ancestors)
            call = NewCall(self.import_name(_MESH, first), [mesh.devices, f"({mesh.axis},)"])
            rows = [self.assignment(mesh.variable, call, len(self.indent(statement)))]
            for axis, variable in sorted(mesh.shardings.items()):
                named = self.import_name("jax.sharding.NamedSharding", first)
                spec = self.partition_spec(first, axis)
                rows.append(f"{variable} = {named}({mesh.variable}, {spec})")
            self.insert_above(statement, rows, first=True)

    def move_comments(self, node: Any, kept: Iterable[Any]) -> None:
        """Insert the comments of a node above its statement, without those of its `kept` parts."""
        start, end = self.module.span(node)
        code = bytearray(self.module.source.code[start:end])
        for part_start, part_end in map(self.module.span, filter(self.module.holds, kept)):
            part = slice(part_start - start, part_end - start)
            code[part] = code[part].replace(b"#", b" ")
        text = f"({code.decode()})"  # so that lines of a decorator are one expression
        tokens = tokenize.generate_tokens(io.StringIO(text).readline)
        if comments := [token.string for token in tokens if token.type == tokenize.COMMENT]:
            self.insert_above(node, comments)


def indentation(line: str) -> str:
    """Return the spaces and tabs that a line begins with."""
    return line[: len(line) - len(line.lstrip())]


def _indentation_of(text: str) -> str:
    """Return the spaces of one level of indentation, two or four, as most lines of a file show."""
    depths = [len(match[1]) for match in re.finditer(r"(?m)^( +)\S", text)]
    return "  " if sum(depth % 4 == 2 for depth in depths) * 5 > len(depths) else "    "
