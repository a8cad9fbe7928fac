"""The plan of a file: the mesh and specs of each mapped function, and whether it is a jit."""

import ast
import dataclasses
import itertools
from collections.abc import Mapping, Sequence

from jax_dist.lint.model import stacking
from jax_dist.lint.model.semantic_model import Module
from jax_dist.lint.model.stacking import Kind
from jax_dist.migrate.places import CannotMigrate
from jax_dist.migrate.shard_map import global_steps
from jax_dist.migrate.shard_map.global_steps import AxisUses
from jax_dist.migrate.shard_map.layouts import Layout, Layouts
from jax_dist.migrate.shard_map.mappings import Pmapped
from jax_dist.migrate.shard_map.text import NewMesh, Writer
from jax_dist.migrate.shard_map.variables import Variable, Variables


@dataclasses.dataclass(eq=False)
class MigrationPlan:
    """Plan of what each mapped function of a file becomes, and the writer of the new text."""

    module: Module
    mapped_functions: Sequence[Pmapped]
    variables: Variables
    layouts: Layouts
    # By function that becomes `jax.jit` alone: what it drops.
    plain_jits: dict[Pmapped, AxisUses] = dataclasses.field(default_factory=dict)
    # By function that does not: why it needs shard_map.
    remarks: dict[Pmapped, str] = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        self.writer: Writer
        self._replicated_uses: dict[tuple[ast.AST, str], set[ast.AST]] = {}  # by mesh
        functions = self.mapped_functions
        self.mapped_by_call = {call: mapped for mapped in functions for call in mapped.calls}
        blocks = [_outermost_block(self.module, mapped.site.node) for mapped in functions]
        self._is_at_top = self.module.tree in blocks
        self._default_axis = next(filter(None, map(self._axis_name, functions)), '"devices"')

    def choose_jits(self, shard_map_lines: Mapping[int, str]) -> None:
        """Choose the functions that become a plain `jax.jit`, and say why others need shard_map."""
        # `shard_map_lines`: the places, by line, that a run has shown to need it, and why.
        for mapped in self.mapped_functions:
            try:
                self.plain_jits[mapped] = self._find_axis_uses(mapped, shard_map_lines)
            except CannotMigrate as error:
                self.remarks[mapped] = f"stays in shard_map: {error.reason}"
        self._exclude_sharing_functions()
        # pmap takes a random key for each device, a plain jit one for the whole batch: it is no
        # longer stacked. Only a run can show whether the program may have other random numbers.
        for mapped in self.plain_jits:
            variables, positions = self._key_variables(mapped), self._key_positions(mapped)
            self.layouts.of_variable |= dict.fromkeys(variables, Layout.REPLICATED)
            self.layouts.arguments |= {(mapped, p): Layout.REPLICATED for p in positions}

    def _find_axis_uses(self, mapped: Pmapped, shard_map_lines: Mapping[int, str]) -> AxisUses:
        """Return the uses of pmap's axis that a plain jit drops, such as `pmean(x, axis)`."""
        # Raises CannotMigrate if the function needs shard_map; see `choose_jits` for the lines.
        line = self.module.source.position(self.module.span(mapped.site.reference)[0]).line
        if line in shard_map_lines:  # with the reason, or with "" if the run gave none
            reason = shard_map_lines[line] or global_steps.why_it_differs(self.module, mapped)
            raise CannotMigrate(reason)
        for variable in self._key_variables(mapped):
            uses = {use.kind for use in variable.uses}
            if variable.kinds() != {"keys"} or uses != {"argument"}:  # the program reads them, too
                raise CannotMigrate("keys per device")
        return global_steps.find_axis_uses(self.module, mapped, self.layouts, self.axis(mapped))

    def _exclude_sharing_functions(self) -> None:
        """Give up plain jit for functions that share a helper or keys with a shard_map function."""
        # The pmean in the helper has to stay for the shard_map, and under plain jit it is an error.
        keys = {mapped: self._key_variables(mapped) for mapped in self.mapped_functions}
        while True:  # each function that is given up keeps its own helpers and keys
            kept: set[ast.AST | Variable] = set()
            for mapped in self.mapped_functions:
                if mapped not in self.plain_jits:
                    kept |= {*global_steps.nodes_of(self.module, mapped), *keys[mapped]}
            dropped = {x: {*u.operands, *u.keywords, *keys[x]} for x, u in self.plain_jits.items()}
            sharing = [mapped for mapped, parts in dropped.items() if kept & parts]
            if not sharing:
                return
            remark = "stays in shard_map: another mapped function shares its reductions or keys"
            for mapped in sharing:
                del self.plain_jits[mapped]
                self.remarks[mapped] = remark

    def _key_positions(self, mapped: Pmapped) -> list[int]:
        """Return the positions of the arguments that hold one random key for each device."""
        stacked = self.stacked_parameters(mapped)
        return [p for p, name in enumerate(mapped.parameters) if stacked.get(name)]

    def _key_variables(self, mapped: Pmapped) -> set[Variable]:
        """Return the variables at `_key_positions`; `step(split(key, n))` passes none."""
        positions = self._key_positions(mapped)
        nodes = [mapped.arguments(call)[p] for p in positions for call in mapped.calls]
        return {*filter(None, map(self.variables.find, nodes))}

    def axis(self, mapped: Pmapped) -> str:
        """Return the code of the mapped axis's name, such as `"batch"` with its quotes."""
        return self._axis_name(mapped) or self._default_axis

    def _axis_name(self, mapped: Pmapped) -> str | None:
        """Return the code of pmap's `axis_name`, a name or a text with quotes; None without one."""
        node = mapped.site.arguments.get("axis_name")
        value = self.module.value(node) if node is not None and self.module.holds(node) else None
        if isinstance(value, ast.Constant) and self.module.function(value) is not None:
            # A function has `axis = "batch"`. The mesh may be made above it, so it takes "batch".
            return self.module.text(value)
        return mapped.option_texts.get("axis_name")

    def mesh(self, at: ast.AST, mapped: Pmapped) -> NewMesh:
        """Return the mesh of a mapped function, which the new text defines, for use at a node."""
        block = self.module.tree if self._is_at_top else _outermost_block(self.module, at)
        return self.writer.mesh(at, self.axis(mapped), self._devices(mapped, at), block)

    def sharded(self, at: ast.AST, mapped: Pmapped) -> str:
        """Return the variable of `NamedSharding(mesh, P(axis))`, for use at a node."""
        return self.writer.sharding(self.mesh(at, mapped), self.axis(mapped))

    def replicated(self, at: ast.AST, mapped: Pmapped) -> str:
        """Return the code of `NamedSharding(mesh, P())`, for use at a node, or its variable."""
        # It has one for jits, and if several nodes need it; they are known once all is written.
        mesh = self.mesh(at, mapped)
        uses = self._replicated_uses.setdefault((mesh.block, mesh.variable), set())
        uses.add(at)
        if self.plain_jits or len(uses) > 1:
            return self.writer.sharding(mesh, "")
        name = self.writer.import_name("jax.sharding.NamedSharding", at)
        return f"{name}({mesh.variable}, {self.writer.partition_spec(at)})"

    def _devices(self, mapped: Pmapped, at: ast.AST) -> str:
        """Return the code of a mesh's devices: `jax.devices()`, or those that pmap was given."""
        node, text = mapped.site.arguments.get("devices"), mapped.option_texts.get("devices")
        all_devices = f"{self.writer.import_name('jax.devices', at)}()"
        if not node or not text or stacking.lists_devices(self.module, node, all_of_them=True):
            return all_devices
        is_list = isinstance(self.module.value(node), ast.List | ast.ListComp)
        may_be_none = isinstance(node, ast.Name | ast.Attribute) and not is_list
        return f"{all_devices} if {text} is None else {text}" if may_be_none else text

    def stacked_results(self, mapped: Pmapped) -> list[bool]:
        """Return for each result whether it keeps the device axis."""
        layouts = (self.layouts.results[mapped, index] for index in range(mapped.result_count))
        return [layout is Layout.STACKED for layout in layouts]

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
            return {"keys"} <= variable.kinds() <= {"keys", "result"}
        change = self.variables.changes.find(node)
        return change is not None and change.kind is Kind.KEYS


def _outermost_block(module: Module, node: ast.AST) -> ast.AST:
    """Return the outermost function whose body holds a node; else the module."""
    is_function = lambda x: isinstance(x, ast.FunctionDef | ast.AsyncFunctionDef)
    pairs = itertools.pairwise([node, *module.ancestors(node)])
    blocks = [y for x, y in pairs if is_function(y) and module.scopes.fields.get(x) == "body"]
    return blocks[-1] if blocks else module.tree
