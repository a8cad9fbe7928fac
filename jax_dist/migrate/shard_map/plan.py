"""The plan of a file: the mesh and specs of each mapped function, and whether it is a jit."""

import ast
import itertools
from collections.abc import Mapping, Sequence

from jax_dist.lint.model import stacking
from jax_dist.lint.model.semantic_model import Module
from jax_dist.lint.model.stacking import Kind
from jax_dist.migrate.places import Left
from jax_dist.migrate.shard_map import global_steps
from jax_dist.migrate.shard_map.layouts import Layout, Layouts
from jax_dist.migrate.shard_map.mappings import Mapped
from jax_dist.migrate.shard_map.text import Writer
from jax_dist.migrate.shard_map.values import Values


class Plan:
    """What each mapped function of a file becomes, and the writer of the new text."""

    def __init__(self, module: Module, mapped: Sequence[Mapped], values: Values, layouts: Layouts):
        self.module: Module = module
        self.mapped: Sequence[Mapped] = mapped
        self.values: Values = values
        self.layouts: Layouts = layouts
        self.writer: Writer = Writer(module)
        self.mapped_of: dict[ast.Call, Mapped] = {call: f for f in mapped for call in f.calls}
        # By function that becomes `jax.jit` alone: its calls of pmean and psum, and their operands.
        self.reductions: dict[Mapped, list[tuple[ast.Call, ast.expr]]] = {}
        self.remarks: dict[Mapped, str] = {}  # why the others need shard_map
        at_top = any(isinstance(home_of(module, fun.site.node), ast.Module) for fun in mapped)
        self._shared_home = module.tree if at_top else None
        self._default_axis = next(filter(None, map(self._axis_of, mapped)), '"devices"')

    # --- forms

    def find_global_steps(self, shard_map_lines: Mapping[int, str]) -> None:
        """Find the functions that become `jax.jit` alone; the lines given, with reasons, do not."""
        for mapped in self.mapped:
            line = self.module.source.position(self.module.span(mapped.site.reference)[0]).line
            keys = [name for name, is_key in self.slices(mapped).items() if is_key]
            try:
                if line in shard_map_lines:
                    reason = shard_map_lines[line]
                    raise Left(reason or global_steps.why_it_differs(self.module, mapped))
                axis = mapped.texts.get("axis_name", self._default_axis)
                self.reductions[mapped] = global_steps.reductions(
                    self.module, mapped, self.layouts, axis, keys
                )
            except Left as left:
                self.remarks[mapped] = f"not jit alone: {left.reason}"
        # A helper such as `compute_metrics`, with a pmean, may be called by a step that becomes jit
        # and by one that does not: then both need shard_map. Repeat, for that may concern others.
        while True:
            others = (fun for fun in self.mapped if fun not in self.reductions)
            stays = {node for fun in others for node in global_steps.nodes_of(self.module, fun)}
            steps = self.reductions.items()
            shared = [fun for fun, calls in steps if not stays.isdisjoint(dict(calls))]
            if not shared:
                return
            for mapped in shared:
                del self.reductions[mapped]
                self.remarks[mapped] = (
                    "not jit alone: another mapped function shares its reductions"
                )

    # --- meshes

    def axis(self, mapped: Mapped) -> str:
        """Return the code of the mapped axis's name, such as `"batch"` with its quotes."""
        return self._axis_of(mapped) or self._default_axis

    def _axis_of(self, mapped: Mapped) -> str | None:
        """Return the code of the axis's name, or None if pmap got none.

        The mesh may stand above the assignment of a variable, so a constant is written out.
        """
        node = mapped.site.arguments.get("axis_name")
        value = self.module.value(node) if node is not None and self.module.holds(node) else None
        is_constant = isinstance(value, ast.Constant) and self.module.function(value) is not None
        return self.module.text(value) if is_constant else mapped.texts.get("axis_name")

    def mesh(self, at: ast.AST, mapped: Mapped) -> str:
        """Return the variable of a mapped function's mesh, for use at a node."""
        home = self._shared_home or home_of(self.module, at)
        return self.writer.mesh(at, self.axis(mapped), self._devices(mapped, at), home)

    def sharded(self, at: ast.AST, mapped: Mapped) -> str:
        """Return the variable of the sharding over the mapped axis, for use at a node."""
        home = self._shared_home or home_of(self.module, at)
        return self.writer.sharded(self.mesh(at, mapped), home)

    def replicated(self, at: ast.AST, mapped: Mapped) -> str:
        """Return the code `NamedSharding(mesh, P())`."""
        named, mesh = self.writer.name("jax.sharding.NamedSharding", at), self.mesh(at, mapped)
        return f"{named}({mesh}, {self.writer.spec(at, None)})"

    def _devices(self, mapped: Mapped, at: ast.AST) -> str:
        """Return the code of a mesh's devices: all, or those that pmap was given."""
        devices, text = mapped.site.arguments.get("devices"), mapped.texts.get("devices", "")
        jax_devices = self.writer.name("jax.devices", at)
        if (
            not text
            or devices is None
            or stacking.lists_devices(self.module, devices, all_of_them=True)
        ):
            return f"{jax_devices}()"
        may_be_none = isinstance(devices, ast.Name | ast.Attribute)
        return f"{jax_devices}() if {text} is None else {text}" if may_be_none else text

    # --- arguments and results

    def sliced_results(self, mapped: Mapped) -> list[bool]:
        """Return for each result whether it keeps the device axis: one slice for each device."""
        layouts = self.layouts.results
        return [layouts[mapped, i] is Layout.SLICES for i in range(mapped.results or 1)]

    def slices(self, mapped: Mapped) -> dict[str, bool]:
        """Return the parameters that keep the device axis, and whether each is a random key."""
        return {
            name: all(self._is_keys(mapped.arguments(call)[p]) for call in mapped.calls)
            for p, name in enumerate(mapped.parameters)
            if p not in mapped.static and self.layouts.arguments[mapped, p] is Layout.SLICES
        }

    def _is_keys(self, node: ast.expr) -> bool:
        """Return whether an argument is `jax.random.split(key, n)`, one key for each device."""
        value = self.values.find(node)
        if value is not None and isinstance(node, ast.Name):
            kinds = {definition.kind for definition in value.definitions}
            return "keys" in kinds and kinds <= {"keys", "result"}
        stacked = self.values.changes.find(node)
        return stacked is not None and stacked.kind is Kind.KEYS


def home_of(module: Module, node: ast.AST) -> ast.AST:
    """Return the outermost function whose body holds a node; the tree if there is none."""
    home: ast.AST = module.tree
    for inner, around in itertools.pairwise([node, *module.ancestors(node)]):
        is_function = isinstance(around, ast.FunctionDef | ast.AsyncFunctionDef)
        if is_function and module.scopes.fields.get(inner) == "body":
            home = around
    return home
