"""One way in which a value may have come about, and what may be asked of it."""

import ast
import dataclasses

from jax_dist.checker import scopes, structure
from jax_dist.checker.modules import Module
from jax_dist.checker.pmaps import Site
from jax_dist.checker.stacking import Kind
from jax_dist.checker.structure import Path

STACKED = frozenset((Kind.MAPPED, Kind.REPLICATED, Kind.KEYS, Kind.SPLIT))


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
        return self.kind in STACKED


def is_whole(module: Module, origin: Origin) -> bool:
    """Whether no other file can have a part in it: functions on its way have no other callers."""
    return all(_is_private(module, function) for function in origin.through)


def _is_private(module: Module, function: scopes.Function) -> bool:
    if isinstance(function, ast.Lambda):
        return module.function(function) is not None
    return function.name.startswith("_") or isinstance(module.scope(function).node, scopes.Function)


def is_tree(module: Module, origin: Origin) -> bool | None:
    """Whether a stacked value is a tuple or dict (True), an array (False), or either (None)."""
    if origin.kind is Kind.KEYS:
        return False
    if origin.site is not None:
        return structure.result_is_tree(module, origin.site, origin.path)
    name = module.qualified_name(origin.node.func) if isinstance(origin.node, ast.Call) else None
    by_numpy = name is not None and name.rpartition(".")[0] in ("jax.numpy", "numpy")
    return False if by_numpy and not origin.path else None
