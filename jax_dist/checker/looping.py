"""Writes a loop that collects as a function and `lax.map` over the rows."""

import ast
from collections.abc import Iterator, Sequence
from typing import Any

from jax_dist.checker import collecting, structure
from jax_dist.checker.collecting import Collected, Collecting
from jax_dist.checker.findings import Edit, Fix, Safety
from jax_dist.checker.modules import Module

# A name that says something of the row; `k` and `i` do not.
_TELLING = 3  # letters
# What speaks to other devices or to the host would do so in a loop of the program.
_REACHING_OUT = tuple(
    [f"jax.lax.{name}" for name in ("psum", "pmean", "pmax", "pmin", "all_gather", "all_to_all")]
    + [f"jax.lax.{name}" for name in ("ppermute", "pshuffle", "psum_scatter")]
    + ["jax.pure_callback", "jax.experimental.io_callback", "jax.debug."]
)


class Names:
    """Names for functions that a file does not have yet.

    Args:
      module: the file.
    """

    def __init__(self, module: Module):
        self._module = module
        self._given: set[str] = set()

    def for_rows(self, target: str) -> str:
        """Such as `per_key`, for the rows that are called `key`."""
        word = target.strip("_")
        base = f"per_{word}" if len(word) >= _TELLING else "per_row"
        number, name = 1, base
        while name in self._given or self._is_taken(name):
            number += 1
            name = f"{base}_{number}"
        self._given.add(name)
        return name

    def _is_taken(self, name: str) -> bool:
        return any(name in each.bindings or name in each.loads for each in self._module.scopes.all)


def fix(module: Module, found: Collecting, names: Names) -> Fix | None:
    """The fix; None where it might change what is computed, or would lose a comment."""
    if not isinstance(found.loop.target, ast.Name) or not _is_sound(module, found):
        return None
    writer = _Writer(module, found)
    if not writer.is_tidy():
        return None
    return writer.fix(names.for_rows(found.loop.target.id))


def _is_sound(module: Module, found: Collecting) -> bool:
    for each in found.lists:
        for stack in each.stacks:
            is_stack = module.qualified_name(stack.func) == "jax.numpy.stack"
            if not is_stack and not structure.is_array(module, each.element):
                return False  # a tuple would become a tuple of arrays
            if not _is_plain(stack):
                return False
    inside = [node for each in found.loop.body for node in ast.walk(each)]
    calls = [node for node in inside if isinstance(node, ast.Call)]
    return not any(_reaches_out(module, each) for each in calls) and _may_wait(found)


def _is_plain(stack: ast.Call) -> bool:
    """Whether it stacks along a new first dimension, and does no more."""
    axes = [*stack.args[1:], *(each.value for each in stack.keywords if each.arg == "axis")]
    is_first = all(isinstance(each, ast.Constant) and each.value == 0 for each in axes)
    is_stack = len(axes) == len(stack.args) - 1 + len(stack.keywords) <= 1
    return is_stack and is_first


def _reaches_out(module: Module, call: ast.Call) -> bool:
    name = module.qualified_name(call.func)
    if name is not None:
        return name.startswith(_REACHING_OUT)
    root = call.func
    while isinstance(root, ast.Attribute | ast.Call | ast.Subscript):
        root = root.func if isinstance(root, ast.Call) else root.value
    return isinstance(root, ast.Name) and root.id in ("self", "cls")


def _may_wait(found: Collecting) -> bool:
    """Whether each element is the same at the end of the round as where it is appended."""
    for each in found.lists:
        read = {node.id for node in ast.walk(each.element) if isinstance(node, ast.Name)}
        for later in found.loop.body[found.loop.body.index(each.append) + 1 :]:
            stored = {
                node.id
                for node in ast.walk(later)
                if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
            }
            if read & stored:
                return False
    return True


class _Writer:
    """The edits of one loop.

    Args:
      module: its file.
      found: the loop.
    """

    def __init__(self, module: Module, found: Collecting):
        self._module, self._found = module, found
        self._code = module.source.code
        self._body = found.loop.body
        self._begun = list(dict.fromkeys(each.begun for each in found.lists))
        self._targets, self._dropped = self._named_at_once()

    def _named_at_once(self) -> tuple[dict[str, str], list[ast.stmt]]:
        """What the lists are called once stacked, and the statements that did it.

        `ys = jnp.stack(xs)` right behind the loop, the only use of `xs`, makes it `ys` at once;
        `xs = jnp.stack(xs)` may stand anywhere behind.
        """
        lists = {each.name: each for each in self._found.lists}
        targets = {name: name for name in lists}
        dropped: list[ast.stmt] = []
        is_next = True
        behind = self._found.block[self._found.block.index(self._found.loop) + 1 :]
        for statement in behind:
            pairs = list(collecting.assigned(statement))
            stacked = [_stacked_in(value, lists) for _, value in pairs]
            names = [each.id for each, _ in pairs if isinstance(each, ast.Name)]
            is_stacks = bool(pairs) and None not in stacked and len(names) == len(pairs)
            is_once = all(each is not None and len(each.stacks) == 1 for each in stacked)
            is_same = [each and each.name for each in stacked] == names
            if is_stacks and (is_same or (is_next and is_once)):
                dropped.append(statement)
                for name, each in zip(names, stacked, strict=True):
                    targets[each.name] = name  # type: ignore[union-attr] # not None
            else:
                is_next = False
        return targets, dropped

    # --- whether

    def is_tidy(self) -> bool:
        """Whether what goes has its lines for itself, and no comment goes with it."""
        alone = [*self._begun, *self._dropped, *self._body]
        if not all(map(self._stands_alone, alone)) or not self._colon():
            return False
        if any(not _begins_only(each, self._found.lists) for each in self._begun):
            return False
        gone = [*self._begun, *self._dropped, *(each.append for each in self._found.lists)]
        gone += [stack for each in self._found.lists for stack in each.stacks]
        return not any(b"#" in self._bytes(each) for each in gone)

    def _stands_alone(self, statement: ast.stmt) -> bool:
        start, end = self._module.span(statement)
        before = self._code[self._line(start) : start]
        behind = self._code[end : self._next_line(end)].strip()
        return not before.strip() and (not behind or behind.startswith(b"#"))

    def _colon(self) -> int:
        """Where the colon behind the rows stands; 0: not right behind them."""
        end = self._module.span(self._found.loop.iter)[1]
        rest = self._code[end : self._next_line(end)]
        blank = len(rest) - len(rest.lstrip(b" \t"))
        return end + blank if rest[blank : blank + 1] == b":" else 0

    # --- what

    def fix(self, name: str) -> Fix:
        module, loop = self._module, self._found.loop
        mapping, imports = module.name_for("jax.lax.map", loop)
        rows = module.text(loop.iter)
        if collecting.is_range(module, loop.iter):
            arange, more = module.name_for("jax.numpy.arange", loop)
            rows = f"{arange}({module.text(loop.iter.args[0])})"  # type: ignore[attr-defined]
            imports = tuple(dict.fromkeys((*imports, *more)))
        start = module.span(loop)[0]
        edits = [Edit(start, self._colon(), f"def {name}({loop.target.id})")]  # type: ignore[attr-defined]
        edits += self._gap(start)
        edits += (self._removal(each) for each in (*self._begun, *self._dropped))
        edits += self._returning()
        targets = ", ".join(self._targets[each.name] for each in self._found.lists)
        edits += self._called(f"{targets} = {mapping}({name}, {rows})")
        edits += self._in_line()
        return Fix("use lax.map", Safety.UNSAFE, tuple(_joined(edits)), imports)

    def _gap(self, start: int) -> Iterator[Edit]:
        """A blank line above the function and its comments, below anything else."""
        block = self._found.block
        above = [each for each in block[: block.index(self._found.loop)] if each not in self._begun]
        gone = {each.start: each.end for each in map(self._removal, self._begun)}
        line = self._line(start)
        while self._code[self._line(line - 1) : line].lstrip().startswith(b"#"):
            line = self._line(line - 1)
        over = line
        while gone.get(self._line(over - 1)) == over:
            over = self._line(over - 1)
        if above and self._code[:over].splitlines()[-1:] != [b""]:
            yield Edit(line, line, "\n")

    def _returning(self) -> Iterator[Edit]:
        """The appends go; the function returns what they appended."""
        *others, last = self._body
        values = ", ".join(self._value(each.element) for each in self._found.lists)
        for each in self._found.lists:
            if each.append is not last:
                yield self._removal(each.append)
        if any(each.append is last for each in self._found.lists):
            yield Edit(*self._module.span(last), f"return {values}")
        else:
            indent = self._indent(self._body[0])
            at = self._line_end(last)
            yield Edit(at, at, f"\n{indent}return {values}")

    def _value(self, element: ast.expr) -> str:
        text = self._module.text(element)
        is_bare = isinstance(element, ast.Tuple | ast.Starred | ast.Lambda | ast.GeneratorExp)
        return f"({text})" if is_bare or not _is_one_line(text) else text

    def _called(self, call: str) -> Iterator[Edit]:
        indent = self._indent(self._found.loop)
        at = self._behind_comments(self._line_end(self._body[-1]), len(indent))
        yield Edit(at, at, f"\n\n{indent}{call}")

    def _in_line(self) -> Iterator[Edit]:
        """`jnp.stack(xs)` elsewhere is `xs`."""
        for each in self._found.lists:
            for stack in each.stacks:
                if self._module.statement(stack) not in self._dropped:
                    yield Edit(*self._module.span(stack), self._targets[each.name])

    def _removal(self, statement: ast.stmt) -> Edit:
        """A statement with its line; a comment behind it stays on a line of its own."""
        start, end = self._module.span(statement)
        rest = self._code[end : self._next_line(end)]
        if rest.strip():
            return Edit(start, end + len(rest) - len(rest.lstrip(b" \t")), "")
        return Edit(self._line(start), self._next_line(end), "")

    # --- places

    def _bytes(self, node: ast.AST) -> bytes:
        start, end = self._module.span(node)
        return self._code[start:end]

    def _indent(self, node: ast.AST) -> str:
        start = self._module.span(node)[0]
        return self._code[self._line(start) : start].decode()

    def _line(self, offset: int) -> int:
        return self._code.rfind(b"\n", 0, offset) + 1

    def _next_line(self, offset: int) -> int:
        return self._code.find(b"\n", offset) + 1 or len(self._code)

    def _behind_comments(self, end: int, indent: int) -> int:
        """Behind comments that stand below the body, as deep as it."""
        while True:
            line = self._code[self._next_line(end) : self._next_line(self._next_line(end))]
            text = line.rstrip()
            if not text.lstrip().startswith(b"#") or len(text) - len(text.lstrip()) <= indent:
                return end
            end = self._next_line(end) + len(text)

    def _line_end(self, statement: ast.stmt) -> int:
        """Behind a statement and its comment."""
        end = self._module.span(statement)[1]
        return end + len(self._code[end : self._next_line(end)].rstrip())


def _stacked_in(value: ast.expr, lists: dict[str, Collected]) -> Collected | None:
    for each in lists.values():
        if value in each.stacks:
            return each
    return None


def _begins_only(statement: ast.stmt, lists: Sequence[Collected]) -> bool:
    names = {each.name for each in lists}
    targets: Any = getattr(statement, "targets", None) or [statement.target]  # type: ignore[attr-defined]
    stored = [node.id for each in targets for node in ast.walk(each) if isinstance(node, ast.Name)]
    return names.issuperset(stored)


def _is_one_line(text: str) -> bool:
    """Whether it can follow `return` as it is."""
    try:
        return len(ast.parse(f"return {text}\n").body) == 1
    except SyntaxError:
        return False


def _joined(edits: Sequence[Edit]) -> Iterator[Edit]:
    """Insertions at one place as one, in the order in which they were made."""
    texts: dict[tuple[int, int], str] = {}
    for each in edits:
        place = (each.start, each.end)
        texts[place] = texts.get(place, "") + each.text
    yield from sorted(Edit(*place, text) for place, text in texts.items())
