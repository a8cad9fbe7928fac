"""The plan of a file: the mesh and specs of each mapped function, and whether it is a jit."""

import ast
import itertools
from collections.abc import Mapping, Sequence

from jax_dist.lint.model import stacking
from jax_dist.lint.model.semantic_model import Module
from jax_dist.lint.model.stacking import Kind
from jax_dist.migrate.places import CannotMigrate
from jax_dist.migrate.shard_map import global_steps
from jax_dist.migrate.shard_map.layouts import Layout, Layouts
from jax_dist.migrate.shard_map.mappings import MappedFunction
from jax_dist.migrate.shard_map.text import Mesh, Writer
from jax_dist.migrate.shard_map.variables import Variables


class Plan:
    """What each mapped function of a file becomes, and the writer of the new text."""

    def __init__(
        self,
        module: Module,
        mapped_functions: Sequence[MappedFunction],
        variables: Variables,
        layouts: Layouts,
    ):
        self.module: Module = module
        self.mapped_functions: Sequence[MappedFunction] = mapped_functions
        self.variables: Variables = variables
        self.layouts: Layouts = layouts
        self.writer: Writer = Writer(module)
        self.mapped_by_call: dict[ast.Call, MappedFunction] = {
            call: mapped for mapped in mapped_functions for call in mapped.calls
        }
        # By function that becomes `jax.jit` alone: its calls of pmean and psum, and their operands.
        self.reductions: dict[MappedFunction, dict[ast.Call, ast.expr]] = {}
        self.remarks: dict[MappedFunction, str] = {}  # why the others need shard_map
        blocks = [_outermost_block(module, mapped.site.node) for mapped in mapped_functions]
        self._is_at_top = module.tree in blocks
        axes = filter(None, map(self._axis_name, mapped_functions))
        self._default_axis = next(axes, '"devices"')

    def choose_jits(self, shard_map_lines: Mapping[int, str]) -> None:
        """Choose the functions that become `jax.jit` alone; see `rewrite` for `shard_map_lines`."""
        for mapped in self.mapped_functions:
            reference = self.module.span(mapped.site.reference)
            line = self.module.source.position(reference[0]).line
            try:
                if line in shard_map_lines:
                    reason = shard_map_lines[line] or global_steps.why_it_differs(
                        self.module, mapped
                    )
                    raise CannotMigrate(reason)
                if any(self.stacked_parameters(mapped).values()):
                    raise CannotMigrate("keys per device")
                axis = self.axis(mapped)
                self.reductions[mapped] = global_steps.reductions(
                    self.module, mapped, self.layouts, axis
                )
            except CannotMigrate as error:
                self.remarks[mapped] = f"not jit alone: {error.reason}"
        self._keep_shared_reductions()

    def _keep_shared_reductions(self) -> None:
        """Give up the jits with a pmean that another function needs, in a helper that both call.

        Repeats, since each function that is given up needs its own reductions.
        """
        while True:
            others = [x for x in self.mapped_functions if x not in self.reductions]
            kept = {node for x in others for node in global_steps.nodes_of(self.module, x)}
            shared = [x for x, calls in self.reductions.items() if not kept.isdisjoint(calls)]
            if not shared:
                return
            for mapped in shared:
                del self.reductions[mapped]
                reason = "another mapped function shares its reductions"
                self.remarks[mapped] = f"not jit alone: {reason}"

    # --- code of meshes and shardings

    def axis(self, mapped: MappedFunction) -> str:
        """Return the code of the mapped axis's name, such as `"batch"` with its quotes."""
        return self._axis_name(mapped) or self._default_axis

    def _axis_name(self, mapped: MappedFunction) -> str | None:
        """Return the code of pmap's axis_name; None without one.

        For a variable of a function it is the string, since the mesh may be defined above it.
        """
        node = mapped.site.arguments.get("axis_name")
        value = self.module.value(node) if node is not None and self.module.holds(node) else None
        is_local = isinstance(value, ast.Constant) and self.module.function(value) is not None
        return self.module.text(value) if is_local else mapped.option_texts.get("axis_name")

    def mesh(self, at: ast.AST, mapped: MappedFunction) -> Mesh:
        """Return the mesh of a mapped function, which the new text defines, for use at a node."""
        block = self.module.tree if self._is_at_top else _outermost_block(self.module, at)
        return self.writer.mesh(at, self.axis(mapped), self._devices(mapped, at), block)

    def sharded(self, at: ast.AST, mapped: MappedFunction) -> str:
        """Return the variable of `NamedSharding(mesh, P(axis))`, for use at a node."""
        return self.writer.sharding(self.mesh(at, mapped))

    def replicated(self, at: ast.AST, mapped: MappedFunction) -> str:
        """Return the code `NamedSharding(mesh, P())`, for use at a node."""
        name = self.writer.import_name("jax.sharding.NamedSharding", at)
        return f"{name}({self.mesh(at, mapped).variable}, {self.writer.partition_spec(at)})"

    def _devices(self, mapped: MappedFunction, at: ast.AST) -> str:
        """Return the code of a mesh's devices: `jax.devices()`, or those that pmap was given."""
        node, text = mapped.site.arguments.get("devices"), mapped.option_texts.get("devices")
        all_devices = f"{self.writer.import_name('jax.devices', at)}()"
        if node is None or not text:
            return all_devices
        if stacking.lists_devices(self.module, node, all_of_them=True):
            return all_devices
        may_be_none = isinstance(node, ast.Name | ast.Attribute)
        return f"{all_devices} if {text} is None else {text}" if may_be_none else text

    # --- arguments and results that keep the device axis

    def stacked_results(self, mapped: MappedFunction) -> list[bool]:
        """Return for each result whether it keeps the device axis."""
        layouts = self.layouts.results
        return [layouts[mapped, index] is Layout.STACKED for index in range(mapped.result_count)]

    def stacked_parameters(self, mapped: MappedFunction) -> dict[str, bool]:
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
    """Return the outermost function whose body holds a node; the module if there is none."""
    block: ast.AST = module.tree
    for inner, outer in itertools.pairwise([node, *module.ancestors(node)]):
        is_function = isinstance(outer, ast.FunctionDef | ast.AsyncFunctionDef)
        if is_function and module.scopes.fields.get(inner) == "body":
            block = outer
    return block
