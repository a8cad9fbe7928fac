"""Where a value comes from, as far as its file shows: mapped calls, copies, split batches.

An expression is followed back through names, unpacked tuples, `self.` attributes, loops, and the
functions of the file, until something is met that is known (`stacking`) or that is not followed.
What is not followed is an origin too, of the kind UNKNOWN: code that needs to be sure looks for it.
"""

import ast
import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

from jax_dist.lint.model import functions, pmaps, scopes, stacking
from jax_dist.lint.model.functions import Path
from jax_dist.lint.model.pmaps import Site
from jax_dist.lint.model.semantic_model import Module
from jax_dist.lint.model.stacking import Kind

_STACKED = frozenset((Kind.MAPPED, Kind.REPLICATED, Kind.KEYS, Kind.SPLIT))


@dataclasses.dataclass(frozen=True, slots=True)
class Origin:
    """One way in which a value may have come about."""

    kind: Kind
    node: ast.expr  # what made it, or what could not be followed further
    path: Path = ()  # from the whole that `node` made down to the value
    of: ast.expr | None = None  # what was copied, split, or taken one device's part of
    count: ast.expr | None = None  # the number of devices, where it is written
    site: Site | None = None  # of a mapped call
    on_host: bool = False  # whether it went through `device_get` or NumPy
    through: tuple[scopes.Function, ...] = ()  # whose callers were taken to be those of this file

    @property
    def is_stacked(self) -> bool:
        """Whether its arrays have a dimension over devices in front."""
        return self.kind in _STACKED


def is_whole(module: Module, origin: Origin) -> bool:
    """Whether no other file can have a part in it: functions on its way have no other callers."""
    return all(
        module.function(function) is not None
        if isinstance(function, ast.Lambda)
        else function.name.startswith("_")
        or isinstance(module.scope(function).node, scopes.Function)
        for function in origin.through
    )


def is_tree(module: Module, origin: Origin) -> bool | None:
    """Whether a stacked value is a tuple or dict (True), an array (False), or either (None)."""
    if origin.kind is Kind.KEYS:
        return False
    if origin.site is not None:
        return functions.result_is_tree(module, origin.site, origin.path)
    name = module.qualified_name(origin.node.func) if isinstance(origin.node, ast.Call) else None
    by_numpy = name is not None and name.rpartition(".")[0] in ("jax.numpy", "numpy")
    return False if by_numpy and not origin.path else None


_STEPS = 500  # before a value is given up: files where everything flows everywhere
_DEEPEST = 60  # steps on the way to a value, for each takes some of Python's stack
_LONGEST = 8  # of a path: `node = node.next` would make it longer without end
_SAME = frozenset(("jax.device_put", "jax.block_until_ready"))
_TO_HOST = frozenset(("jax.device_get", "numpy.asarray", "numpy.array"))
_NOT_ARRAYS = frozenset(("shape", "dtype", "ndim", "size", "sharding", "aval", "nbytes", "at", "T"))
_WRAPPED_ITERATORS = frozenset(("iter", "itertools.islice", "itertools.chain", "tqdm.tqdm"))


class Flow:
    """The origins of values in one file."""

    def __init__(self, module: Module):
        self._module = module
        # The calls of mapped functions that this file shows, with what mapped them.
        self.mapped_calls: dict[ast.Call, Site] = {
            call: site
            for site in pmaps.applications(module)
            for call in pmaps.mapped_calls(module, site)
        }
        self._known: dict[ast.expr, tuple[Origin, ...]] = {}
        self._open: set[tuple[ast.AST, Path]] = set()
        self._steps = 0
        self.mapped_calls |= self._handed_on()

    def _handed_on(self) -> dict[ast.Call, Site]:
        """Calls of mapped functions that reach their caller as an argument or a result."""
        made = {
            site.node: site
            for site in pmaps.applications(self._module)
            for read in pmaps.held_by(self._module, site)
            if self._module.call_of(read) is None
            and not isinstance(self._module.parent(read), ast.Assign | ast.AnnAssign)
        }
        found: dict[ast.Call, Site] = {}
        if not made:
            return found
        loads = (each for scope in self._module.scopes.all for each in scope.loads.values())
        calls = filter(None, map(self._module.call_of, itertools.chain.from_iterable(loads)))
        for call in sorted(calls, key=scopes.place):
            if call in self.mapped_calls or self._module.qualified_name(call.func) is not None:
                continue
            match self.origins(call.func):
                case (Origin(node=node, path=()),) if node in made:
                    found[call] = made[node]
        self._known.clear()  # they were asked before these calls were known
        return found

    def origins(self, node: ast.expr) -> tuple[Origin, ...]:
        """All ways in which the value of an expression may have come about; at least one."""
        if node not in self._known:
            self._open.clear()
            self._steps = _STEPS
            found = tuple(dict.fromkeys(self._of(node, ())))
            self._known[node] = found or (Origin(Kind.UNKNOWN, node),)
        return self._known[node]

    def is_stacked(self, node: ast.expr) -> bool:
        """Whether a value surely has a dimension over devices in front."""
        return all(origin.is_stacked for origin in self.origins(node))

    # --- expressions

    def _of(self, node: ast.expr, path: Path) -> list[Origin]:
        return self._followed(node, path, (node, path), self._by_type)

    def _followed(
        self,
        node: ast.expr,
        path: Path,
        key: tuple[ast.AST, Path],
        walk: Callable[[ast.expr, Path], Iterable[Origin]],
    ) -> list[Origin]:
        """What `walk` finds, unless the way there is a circle or too long."""
        self._steps -= 1
        if key in self._open:
            return []  # a loop: what else flows in decides
        if self._steps < 0 or len(self._open) > _DEEPEST or len(path) > _LONGEST:
            return [Origin(Kind.UNKNOWN, node, path)]
        self._open.add(key)
        found = list(walk(node, path))
        self._open.discard(key)
        return found

    def _by_type(self, node: ast.expr, path: Path) -> Iterable[Origin]:
        match node:
            case ast.Name():
                return self._of_name(node, path)
            case ast.Attribute():
                return self._of_attribute(node, path)
            case ast.Subscript():
                return self._of_subscript(node, path)
            case ast.Call():
                return self._of_call(node, path)
            case ast.NamedExpr(value=value):
                return self._of(value, path)
            case ast.IfExp(body=one, orelse=other):
                return [*self._of(one, path), *self._of(other, path)]
            case ast.BoolOp(values=values):
                return [origin for value in values for origin in self._of(value, path)]
            case ast.Constant(value=None):
                return []  # a name that has no value yet
        part = functions.part_of(node, path)
        return [Origin(Kind.UNKNOWN, node, path)] if part is None else self._of(part, path[1:])

    def _of_name(self, node: ast.Name, path: Path) -> Iterator[Origin]:
        bindings = self._module.reaching(node)
        if bindings is None:
            yield Origin(Kind.UNKNOWN, node, path)
        for binding in bindings or ():
            match binding.node:
                case _ if binding.kind == "assign" and binding.value is not None:
                    yield from self._of(binding.value, path)
                case ast.arg() as parameter if arguments := self._arguments(parameter):
                    through = self._module.parent(self._module.parent(parameter))
                    for origin in (each for given in arguments for each in self._of(given, path)):
                        yield replace(origin, through=(*origin.through, through))
                case ast.Name(ctx=ast.Del()) if binding.kind == "other":
                    pass
                case ast.Name() as target if binding.kind == "other":
                    yield from self._of_target(target, path)
                case _:
                    yield Origin(Kind.UNKNOWN, node, path)

    def _of_target(self, target: ast.Name, path: Path) -> Iterable[Origin]:
        """What a name gets that stands in a tuple on the left, or behind `for`."""
        node, around = _unpacked(self._module, target)
        if node is not None:
            match around:
                case ast.Assign(value=value):
                    return self._of(value, (*node, *path))
                case ast.For(iter=iterable) | ast.comprehension(iter=iterable):
                    return self._each(iterable, (*node, *path))
        return [Origin(Kind.UNKNOWN, target, path)]

    def _of_attribute(self, node: ast.Attribute, path: Path) -> Iterable[Origin]:
        module = self._module
        stores: list[ast.Attribute] = []  # where the class sets `self.x`, in tuples too
        if module.attribute_values(node) or functions.is_self(node):
            owner = module.class_of(node)
            if owner is not None:
                stores = functions.self_attributes(module, owner, node.attr, ast.Store)
        found: list[Origin] = []
        for store in stores:
            place, around = _unpacked(module, store)
            value = around.value if isinstance(around, ast.Assign | ast.AnnAssign) else None
            if place is not None and value is not None:
                found += self._of(value, (*place, *path))
            else:
                found.append(Origin(Kind.UNKNOWN, store, path))
        if stores:
            return found
        if node.attr in _NOT_ARRAYS or module.qualified_name(node) is not None:
            return [Origin(Kind.UNKNOWN, node, path)]
        return self._of(node.value, (f".{node.attr}", *path))

    def _of_subscript(self, node: ast.Subscript, path: Path) -> Iterator[Origin]:
        match node.slice:
            case ast.Constant(value=str() as key):
                yield from self._of(node.value, (key, *path))
                return
            case ast.Constant(value=int() as position):
                wholes = self._of(node.value, ())
            case _:
                yield Origin(Kind.UNKNOWN, node, path)
                return
        for origin in wholes:
            tree = is_tree(self._module, origin) if origin.is_stacked else None
            part = functions.part_of(origin.node, (position,)) if not origin.is_stacked else None
            if part is not None and not origin.path:
                yield from self._of(part, path)
            elif tree:
                yield replace(origin, path=(*origin.path, position, *path))
            elif tree is False and position == 0:
                yield Origin(Kind.ONE, node, path, of=node.value, on_host=origin.on_host)
            else:
                yield Origin(Kind.UNKNOWN, node, path)

    # --- calls

    def _of_call(self, call: ast.Call, path: Path) -> Iterable[Origin]:
        site = self.mapped_calls.get(call)
        if site is not None:
            return [Origin(Kind.MAPPED, call, path, site=site)]
        done = stacking.stacking(self._module, call)
        if done is not None:
            if done.kind is Kind.KEYS and path:  # `a, b = split(key, n)`: no stack any more
                return [Origin(Kind.UNKNOWN, call, path)]
            return [Origin(done.kind, call, path, of=done.of, count=done.count)]
        tree = stacking.first_of_leaves(self._module, call)
        if tree is not None:  # the part of one device only where the tree is stacked
            found = self._of(tree, ())
            if not found or not all(origin.is_stacked for origin in found):
                return [Origin(Kind.UNKNOWN, call, path)]
            on_host = all(origin.on_host for origin in found)
            return [Origin(Kind.ONE, call, path, of=tree, on_host=on_host)]
        name = self._module.qualified_name(call.func) or self._module.builtin(call.func)
        if name in _SAME and call.args:
            return self._of(call.args[0], path)
        if name in _TO_HOST and call.args:
            found = self._of(call.args[0], path)
            return [replace(origin, on_host=True) for origin in found]
        if name == "next" and call.args:
            return self._each(call.args[0], path)
        if isinstance(call.func, ast.Attribute) and call.func.attr == "block_until_ready":
            return self._of(call.func.value, path)
        if name == "dataclasses.replace" and call.args:
            return self._replaced(call.args[0], call, path)
        if isinstance(call.func, ast.Attribute) and call.func.attr in ("replace", "_replace"):
            return self._replaced(call.func.value, call, path)
        function = pmaps.definition(self._module, call.func)  # one of this file
        results = None if function is None else functions.results_of(function)
        if not results:
            return [Origin(Kind.UNKNOWN, call, path)]
        return [origin for result in results for origin in self._of(result, path)]

    def _replaced(self, old: ast.expr, call: ast.Call, path: Path) -> list[Origin]:
        """`state.replace(step=x)`: the old value, and what is put into it."""
        if any(keyword.arg is None for keyword in call.keywords):
            return [Origin(Kind.UNKNOWN, call, path)]
        new = {f".{keyword.arg}": keyword.value for keyword in call.keywords}
        if path and path[0] in new:
            return self._of(new[str(path[0])], path[1:])
        found = self._of(old, path)
        if not path:
            found += [origin for value in new.values() for origin in self._of(value, ())]
        return found

    def _arguments(self, parameter: ast.arg) -> list[ast.expr]:
        """What this file's calls give a parameter; none where not all calls can be read."""
        function: Any = self._module.parent(self._module.parent(parameter))
        calls = functions.callers(self._module, function) or []
        given = [functions.argument_of(self._module, call, function, parameter) for call in calls]
        known = [each for each in given if each is not None]
        return known if len(known) == len(given) else []

    # --- iteration

    def _each(self, node: ast.expr, path: Path) -> list[Origin]:
        """The origins of the elements of an iterable."""
        return self._followed(node, path, (node, ("each", *path)), self._each_by_type)

    def _each_by_type(self, node: ast.expr, path: Path) -> Iterable[Origin]:
        match node:
            case ast.Name() | ast.Attribute():
                values = self._module.values(node)
                if values:
                    return [each for value in values for each in self._each(value, path)]
            case ast.GeneratorExp(elt=element) | ast.ListComp(elt=element):
                return self._of(element, path)
            case ast.List(elts=elements) | ast.Tuple(elts=elements):
                return [each for element in elements for each in self._of(element, path)]
            case ast.Call():
                return self._each_of_call(node, path)
        return [Origin(Kind.UNKNOWN, node, path)]

    def _each_of_call(self, call: ast.Call, path: Path) -> Iterable[Origin]:
        module = self._module
        name = module.qualified_name(call.func) or module.builtin(call.func)
        first = call.args[0] if call.args else None
        if first is not None and name in stacking.PREFETCH:
            return [Origin(Kind.SPLIT, call, path, of=first)]
        if first is not None and name in _WRAPPED_ITERATORS:
            return self._each(first, path)
        if first is not None and name == "enumerate" and path[:1] == (1,):
            return self._each(first, path[1:])
        if name == "zip" and path and isinstance(path[0], int) and path[0] < len(call.args):
            return self._each(call.args[path[0]], path[1:])
        if name == "map" and len(call.args) == 2:
            if module.qualified_name(call.args[0]) in stacking.SHARD:
                return [Origin(Kind.SPLIT, call, path, of=call.args[1])]
            function = pmaps.definition(module, call.args[0])
            results = [] if function is None else functions.results_of(function) or []
            if results:
                return [each for result in results for each in self._of(result, path)]
        function = pmaps.definition(module, call.func)
        yields = [] if function is None else _yielded(function)
        if yields:
            return [each for value in yields for each in self._of(value, path)]
        return [Origin(Kind.UNKNOWN, call, path)]


def of(module: Module) -> Flow:
    """The flow of a file, made once."""
    return module.once(Flow)


def _unpacked(module: Module, target: ast.expr) -> tuple[Path | None, ast.AST]:
    """`((1,), assignment)` of `b` in `a, b = ...`; None for what stands beside a star."""
    place: list[int] = []
    node: ast.AST = target
    around = module.parent(node)
    while isinstance(around, ast.Tuple | ast.List | ast.Starred):
        if isinstance(around, ast.Starred):
            return None, around
        position = next(number for number, each in enumerate(around.elts) if each is node)
        if any(isinstance(each, ast.Starred) for each in around.elts[:position]):
            return None, around
        place.insert(0, position)
        node, around = around, module.parent(around)
    return tuple(place), around


def _yielded(function: scopes.Function) -> list[ast.expr]:
    """What a generator function yields."""
    found = [each for each in functions.own_nodes(function) if isinstance(each, ast.Yield)]
    return [each.value for each in found if each.value is not None]
