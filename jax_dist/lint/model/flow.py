"""Origin of a value, as far as its file shows: mapped calls, copies, split batches.

An expression is followed back through names, unpacked tuples, `self.` attributes and the functions
of the file, until something is met that is known (`stacking`) or that is not followed. What is not
followed is an origin too, of the kind UNKNOWN: code that needs to be sure looks for it.
"""

import ast
import dataclasses
from collections.abc import Iterable, Iterator
from dataclasses import replace

from jax_dist.lint.model import functions, pmaps, stacking
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
    site: Site | None = None  # of a mapped call
    on_host: bool = False  # whether it went through `device_get` or NumPy

    @property
    def is_stacked(self) -> bool:
        """Return whether its arrays have a dimension over devices in front."""
        return self.kind in _STACKED


def is_tree(module: Module, origin: Origin) -> bool | None:
    """Return whether a stacked value is a tuple or dict; None if it may be either."""
    if origin.kind is Kind.KEYS:
        return False
    if origin.site is not None:
        return functions.result_is_tree(module, origin.site, origin.path)
    name = module.qualified_name(origin.node.func) if isinstance(origin.node, ast.Call) else None
    by_numpy = name is not None and name.rpartition(".")[0] in ("jax.numpy", "numpy")
    return False if by_numpy and not origin.path else None


_STEPS = 300  # before a value is given up: files where everything flows everywhere
_DEEPEST = 40  # steps on the way to a value, for each takes some of Python's stack
_LONGEST = 8  # of a path: `node = node.next` would make it longer without end
_SAME = frozenset(("jax.device_put", "jax.block_until_ready"))
_TO_HOST = frozenset(("jax.device_get", "numpy.asarray", "numpy.array"))
_NOT_ARRAYS = frozenset(("shape", "dtype", "ndim", "size", "sharding", "aval", "nbytes", "at", "T"))


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

    def origins(self, node: ast.expr) -> tuple[Origin, ...]:
        """Return all ways in which the value of an expression may have come about; at least one."""
        if node not in self._known:
            self._open.clear()
            self._steps = _STEPS
            found = tuple(dict.fromkeys(self._follow(node, ())))
            self._known[node] = found or (Origin(Kind.UNKNOWN, node),)
        return self._known[node]

    def is_stacked(self, node: ast.expr) -> bool:
        """Return whether a value surely has a dimension over devices in front."""
        return all(origin.is_stacked for origin in self.origins(node))

    def _follow(self, node: ast.expr, path: Path) -> list[Origin]:
        self._steps -= 1
        if (node, path) in self._open:
            return []  # a loop: what else flows in decides
        if self._steps < 0 or len(self._open) > _DEEPEST or len(path) > _LONGEST:
            return [Origin(Kind.UNKNOWN, node, path)]
        self._open.add((node, path))
        found = list(self._by_type(node, path))
        self._open.discard((node, path))
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
                return self._follow(value, path)
            case ast.IfExp(body=one, orelse=other):
                return [*self._follow(one, path), *self._follow(other, path)]
            case ast.Constant(value=None):
                return []  # a name that has no value yet
        part = functions.part_of(node, path)
        return [Origin(Kind.UNKNOWN, node, path)] if part is None else self._follow(part, path[1:])

    def _of_name(self, node: ast.Name, path: Path) -> Iterator[Origin]:
        for binding in self._module.reaching(node) or (None,):
            target = None if binding is None else binding.node
            if binding is not None and binding.kind == "assign" and binding.value is not None:
                yield from self._follow(binding.value, path)
            elif isinstance(target, ast.Name) and isinstance(target.ctx, ast.Del):
                pass
            elif isinstance(target, ast.Name) and (unpacked := _unpacked(self._module, target)):
                value, place = unpacked
                yield from self._follow(value, (*place, *path))
            else:
                yield Origin(Kind.UNKNOWN, node, path)

    def _of_attribute(self, node: ast.Attribute, path: Path) -> Iterable[Origin]:
        module = self._module
        owner = module.class_of(node)
        stores: list[ast.Attribute] = []  # where the class sets `self.x`, in tuples too
        if owner is not None and (module.attribute_values(node) or pmaps.is_self(node)):
            stores = pmaps.self_attributes(module, owner, node.attr, ast.Store)
        if stores:
            found: list[Origin] = []
            for store in stores:
                unpacked = _unpacked(module, store)
                if unpacked is None:
                    return [Origin(Kind.UNKNOWN, node, path)]
                found += self._follow(unpacked[0], (*unpacked[1], *path))
            return found
        if node.attr in _NOT_ARRAYS or module.qualified_name(node) is not None:
            return [Origin(Kind.UNKNOWN, node, path)]
        return self._follow(node.value, (f".{node.attr}", *path))

    def _of_subscript(self, node: ast.Subscript, path: Path) -> Iterator[Origin]:
        match node.slice:
            case ast.Constant(value=str() as key):
                yield from self._follow(node.value, (key, *path))
            case ast.Constant(value=int() as position):
                for origin in self._follow(node.value, ()):
                    yield from self._item(node, origin, position, path)
            case _:
                yield Origin(Kind.UNKNOWN, node, path)

    def _item(
        self, node: ast.Subscript, whole: Origin, position: int, path: Path
    ) -> Iterable[Origin]:
        """Return what an item of a value is: of a tuple, a part; of an array, one device's."""
        tree = is_tree(self._module, whole) if whole.is_stacked else None
        part = functions.part_of(whole.node, (position,)) if not whole.is_stacked else None
        if part is not None and not whole.path:
            return self._follow(part, path)
        if tree:
            return [replace(whole, path=(*whole.path, position, *path))]
        if tree is False and position == 0:
            return [Origin(Kind.ONE, node, path, on_host=whole.on_host)]
        return [Origin(Kind.UNKNOWN, node, path)]

    def _of_call(self, call: ast.Call, path: Path) -> Iterable[Origin]:
        module = self._module
        site = self.mapped_calls.get(call)
        if site is not None:
            return [Origin(Kind.MAPPED, call, path, site)]
        done = stacking.stacking(module, call)
        if done is not None:
            # `a, b = split(key, n)`: no stack any more
            is_unpacked = done.kind is Kind.KEYS and path
            return [Origin(Kind.UNKNOWN if is_unpacked else done.kind, call, path)]
        tree = stacking.first_of_leaves(module, call)
        if tree is not None:  # the part of one device only where the tree is stacked
            found = self._follow(tree, ())
            is_one = found and all(origin.is_stacked for origin in found)
            on_host = all(origin.on_host for origin in found)
            return [Origin(Kind.ONE if is_one else Kind.UNKNOWN, call, path, on_host=on_host)]
        name = module.qualified_name(call.func)
        if call.args and name in _SAME:
            return self._follow(call.args[0], path)
        if call.args and name in _TO_HOST:
            return [replace(each, on_host=True) for each in self._follow(call.args[0], path)]
        if isinstance(call.func, ast.Attribute) and call.func.attr == "block_until_ready":
            return self._follow(call.func.value, path)
        function = pmaps.definition(module, call.func)  # one of this file
        results = None if function is None else functions.results_of(function)
        if not results:
            return [Origin(Kind.UNKNOWN, call, path)]
        return [origin for result in results for origin in self._follow(result, path)]


def of(module: Module) -> Flow:
    """Return the flow of a file, made once."""
    return module.once(Flow)


def _unpacked(module: Module, target: ast.expr) -> tuple[ast.expr, Path] | None:
    """Return `(value, (1,))` of `b` in `a, b = value`; None for what is not so plain."""
    place: list[int] = []
    node: ast.AST = target
    around = module.parent(node)
    while isinstance(around, ast.Tuple | ast.List):
        position = next(number for number, each in enumerate(around.elts) if each is node)
        if any(isinstance(each, ast.Starred) for each in around.elts[:position]):
            return None
        place.insert(0, position)
        node, around = around, module.parent(around)
    if isinstance(around, ast.Assign | ast.AnnAssign) and around.value is not None:
        return around.value, tuple(place)
    return None
