"""The plan of a file: the mesh and specs of each mapped function, and whether it is a jit."""

import ast
import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from jax_dist.lint.model import stacking
from jax_dist.lint.model.semantic_model import Module
from jax_dist.lint.model.stacking import Kind
from jax_dist.migrate.places import CannotMigrate
from jax_dist.migrate.shard_map import global_steps
from jax_dist.migrate.shard_map.layouts import Layout, Layouts
from jax_dist.migrate.shard_map.mappings import Pmapped
from jax_dist.migrate.shard_map.text import Mesh, Writer
from jax_dist.migrate.shard_map.variables import Variable, Variables


@dataclasses.dataclass(eq=False)
class Plan:
    """What each mapped function of a file becomes, and the writer of the new text."""

    module: Module
    mapped_functions: Sequence[Pmapped]
    variables: Variables
    layouts: Layouts
    # By function that becomes `jax.jit` alone: what it drops, see `global_steps.reductions`.
    reductions: dict[Pmapped, dict[Any, Any]] = dataclasses.field(default_factory=dict)
    # By function that does not: why it needs shard_map.
    remarks: dict[Pmapped, str] = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        self.writer: Writer = Writer(self.module)
        functions = self.mapped_functions
        self.mapped_by_call = {call: mapped for mapped in functions for call in mapped.calls}
        blocks = [_outermost_block(self.module, mapped.site.node) for mapped in functions]
        self._is_at_top = self.module.tree in blocks
        self._default_axis = next(filter(None, map(self._axis_name, functions)), '"devices"')

    def choose_jits(self, shard_map_lines: Mapping[int, str]) -> None:
        """Choose the functions that become `jax.jit` alone; see `rewrite` for `shard_map_lines`."""
        module = self.module
        for mapped in self.mapped_functions:
            line = module.source.position(module.span(mapped.site.reference)[0]).line
            try:
                if line in shard_map_lines:
                    reason = "keys per device" if self._keys(mapped) else ""
                    reason = reason or global_steps.why_it_differs(module, mapped)
                    raise CannotMigrate(shard_map_lines[line] or reason)
                for variable in itertools.chain(*self._keys(mapped).values()):
                    uses = {use.kind for use in variable.uses}
                    if variable.kinds() != {"keys"} or uses != {"argument"}:
                        raise CannotMigrate("keys per device")
                arguments = module, mapped, self.layouts, self.axis(mapped)
                self.reductions[mapped] = global_steps.reductions(*arguments)
            except CannotMigrate as error:
                self.remarks[mapped] = f"not jit alone: {error.reason}"
        self._give_up_shared_parts()
        for mapped in self.reductions:  # one key for the whole batch; a run decides whether it may
            for position, variables in self._keys(mapped).items():
                self.layouts.arguments[mapped, position] = Layout.REPLICATED
                self.layouts.of_variable |= dict.fromkeys(variables, Layout.REPLICATED)

    def _give_up_shared_parts(self) -> None:
        """Give up plain jit for functions that share a helper or keys with a shard_map function.

        The pmean in the helper has to stay for the shard_map, and under plain jit it is an error.
        """
        keys_of = lambda mapped: itertools.chain(*self._keys(mapped).values())
        while True:  # each function that is given up needs its own reductions
            others = [x for x in self.mapped_functions if x not in self.reductions]
            kept: set[Any] = {part for x in others for part in keys_of(x)}
            kept.update(*(global_steps.nodes_of(self.module, x) for x in others))
            parts = {x: [*calls, *keys_of(x)] for x, calls in self.reductions.items()}
            shared = [mapped for mapped, of_it in parts.items() if not kept.isdisjoint(of_it)]
            if not shared:
                return
            remark = "not jit alone: another mapped function shares its reductions or keys"
            for mapped in shared:
                del self.reductions[mapped]
                self.remarks[mapped] = remark

    def _keys(self, mapped: Pmapped) -> dict[int, list[Variable]]:
        """Return the variables of the arguments that hold a key for each device, by position.

        Without those of `step(split(key, n))`, which is no variable.
        """
        stacked = self.stacked_parameters(mapped)
        nodes_at = {
            position: [mapped.arguments(call)[position] for call in mapped.calls]
            for position, name in enumerate(mapped.parameters)
            if stacked.get(name)
        }
        find = self.variables.find
        return {position: [*filter(None, map(find, nodes))] for position, nodes in nodes_at.items()}

    # --- code of meshes and shardings

    def axis(self, mapped: Pmapped) -> str:
        """Return the code of the mapped axis's name, such as `"batch"` with its quotes."""
        return self._axis_name(mapped) or self._default_axis

    def _axis_name(self, mapped: Pmapped) -> str | None:
        """Return the code of pmap's axis_name; None without one.

        Below `axis = "batch"` in a function it is `"batch"`: the mesh may be made above that line.
        """
        node = mapped.site.arguments.get("axis_name")
        value = self.module.value(node) if node is not None and self.module.holds(node) else None
        if isinstance(value, ast.Constant) and self.module.function(value) is not None:
            return self.module.text(value)
        return mapped.option_texts.get("axis_name")

    def mesh(self, at: ast.AST, mapped: Pmapped) -> Mesh:
        """Return the mesh of a mapped function, which the new text defines, for use at a node."""
        block = self.module.tree if self._is_at_top else _outermost_block(self.module, at)
        return self.writer.mesh(at, self.axis(mapped), self._devices(mapped, at), block)

    def sharded(self, at: ast.AST, mapped: Pmapped) -> str:
        """Return the variable of `NamedSharding(mesh, P(axis))`, for use at a node."""
        return self.writer.sharding(self.mesh(at, mapped), self.axis(mapped))

    def replicated(self, at: ast.AST, mapped: Pmapped) -> str:
        """Return the code of `NamedSharding(mesh, P())`, for use at a node; a variable for jits."""
        if self.reductions:
            return self.writer.sharding(self.mesh(at, mapped), "")
        name = self.writer.import_name("jax.sharding.NamedSharding", at)
        return f"{name}({self.mesh(at, mapped).variable}, {self.writer.partition_spec(at)})"

    def _devices(self, mapped: Pmapped, at: ast.AST) -> str:
        """Return the code of a mesh's devices: `jax.devices()`, or those that pmap was given."""
        node, text = mapped.site.arguments.get("devices"), mapped.option_texts.get("devices")
        all_devices = f"{self.writer.import_name('jax.devices', at)}()"
        if not node or not text or stacking.lists_devices(self.module, node, all_of_them=True):
            return all_devices
        is_list = isinstance(self.module.value(node), ast.List | ast.ListComp)
        may_be_none = isinstance(node, ast.Name | ast.Attribute) and not is_list
        return f"{all_devices} if {text} is None else {text}" if may_be_none else text

    # --- arguments and results that keep the device axis

    def stacked_results(self, mapped: Pmapped) -> list[bool]:
        """Return for each result whether it keeps the device axis."""
        layouts = self.layouts.results
        return [layouts[mapped, index] is Layout.STACKED for index in range(mapped.result_count)]

    def stacked_parameters(self, mapped: Pmapped) -> dict[str, bool]:
        """Return the parameters that keep the device axis, and whether each is a random key."""
        return {
            name: all(self._is_keys(mapped.arguments(call)[position]) for call in mapped.calls)
            for position, name in enumerate(mapped.parameters)
            if self.layouts.arguments.get((mapped, position)) is Layout.STACKED
        }

    def _is_keys(self, node: ast.expr) -> bool:
        """Return whether an argument is `jax.random.split(key, n)`, one key for each device."""
        variable = self.variables.find(node)
        if variable is not None and isinstance(node, ast.Name):
            kinds = variable.kinds()
            return "keys" in kinds and kinds <= {"keys", "result"}
        change = self.variables.changes.find(node)
        return change is not None and change.kind is Kind.KEYS


def _outermost_block(module: Module, node: ast.AST) -> ast.AST:
    """Return the outermost function whose body holds a node; else the module."""
    block: ast.AST = module.tree
    for inner, outer in itertools.pairwise([node, *module.ancestors(node)]):
        is_function = isinstance(outer, ast.FunctionDef | ast.AsyncFunctionDef)
        if is_function and module.scopes.fields.get(inner) == "body":
            block = outer
    return block
