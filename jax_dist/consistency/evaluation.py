"""A program for any number of devices, evaluated on one of them, and the graph of its equations.

The graph lists the equations, each with those that its operands come from. Calls are looked into,
and so are shard_maps and scans that are short enough; a while loop and a cond count as one
equation. What a scan carries from one round to the next has an origin of its own, which leads
nowhere: rounds are compared one after the other. The evaluation makes the same walk.

A shard_map becomes a vmap over the devices with the same axis names, in which each value has one
row a device. Draws of random numbers can be given: the rows that one device draws, for devices that
have keys of their own.

Each result can be moved by one last place where it is rounded. The number of devices changes the
order of sums, and how a compiler fuses; nothing else may change. So a program is run again with
such a change at every equation, and what that does to a value is what may be expected of another
number of devices. A fixed tolerance would be wrong for most programs: too wide for one, too narrow
for one that amplifies.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn, Literal, Var

from jax_dist import _compat
from jax_dist._rewrite import bodies, interpreter
from jax_dist._rewrite.interpreter import Values
from jax_dist._rewrite.primitive_facts import record_of
from jax_dist.primitives import Primitive

Path: TypeAlias = tuple[int, ...]  # the place of an equation, and of those around it
# An equation and which of its results; ((), n): an input. Below 0: what a scan carries over.
_Origin: TypeAlias = tuple[Path, int]
Origins: TypeAlias = frozenset[_Origin]

_LONGEST_SCAN = 64  # rounds; the values of a longer one are not followed


@dataclasses.dataclass(frozen=True, slots=True)
class _Around:
    """What stands around an equation."""

    line: str = ""  # of the innermost call with one
    rounds: int = 0  # scans
    loop: Path = ()  # the outermost of them
    on_devices: bool = False  # whether each device has its own values: inside of a shard_map

    def inside(self, eqn: JaxprEqn, path: Path) -> "_Around":
        is_scan = _compat.name_of(eqn) == "scan"
        return _Around(
            interpreter.source_line(eqn) or self.line,
            self.rounds + is_scan,
            path if is_scan and not self.loop else self.loop,
            self.on_devices or _compat.name_of(eqn) == "shard_map",
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Node:
    """One equation of the flattened program."""

    path: Path
    eqn: JaxprEqn
    sources: tuple[Origins, ...]  # of each operand; empty for a literal
    around: _Around
    is_draw: bool

    @property
    def name(self) -> str:
        return _compat.name_of(self.eqn)

    @property
    def record(self) -> Primitive:
        return record_of(self.eqn)

    @property
    def rounds(self) -> int:
        """How many scans are around it."""
        return self.around.rounds

    @property
    def line(self) -> str:
        """Of the user: what JAX's own functions do is done by those who call them."""
        return interpreter.source_line(self.eqn) or self.around.line

    @property
    def types(self) -> list[Any]:
        return [var.aval for var in self.eqn.outvars]

    def constant(self, operand: int) -> Any:
        """The value of a literal operand; None for any other."""
        atom = self.eqn.invars[operand]
        return atom.val if isinstance(atom, Literal) else None


@dataclasses.dataclass(frozen=True, slots=True)
class Graph:
    nodes: dict[Path, Node]  # in program order
    results: tuple[Origins, ...]
    carried: dict[_Origin, Origins]  # where the rounds before get what a scan carries over

    @property
    def size(self) -> int:
        """How many numbers the results of all equations are together."""
        types = [kind for node in self.nodes.values() for kind in node.types]
        return sum(math.prod(kind.shape) for kind in types if hasattr(kind, "shape"))

    def rounds_before(self, origins: Origins) -> Origins:
        """Where a value comes from in the rounds before; empty for what no scan carries."""
        found = [self.carried[origin] for origin in origins if origin in self.carried]
        return frozenset().union(*found)

    def before(self, node: Node) -> list[Node]:
        """The equations that a node takes its operands from."""
        found = {path: None for origins in node.sources for path, _ in origins}
        return [self.nodes[path] for path in found if path in self.nodes]

    def reached(
        self, origins: Origins, follows: Callable[[Node], bool] = lambda node: True
    ) -> list[Node]:
        """The equations that a value depends on by way of such ones, in program order."""
        waiting = [self.nodes[path] for path, _ in origins if path in self.nodes]
        seen: set[Path] = set()
        while waiting:
            node = waiting.pop()
            if node.path not in seen and follows(node):
                seen.add(node.path)
                waiting += self.before(node)
        return [node for path, node in self.nodes.items() if path in seen]

    @classmethod
    def of(cls, jaxpr: Any) -> "Graph":
        """The graph of a program, by the walk that `evaluate` makes too."""
        nodes: dict[Path, Node] = {}
        carried: dict[_Origin, Origins] = {}

        def walk(
            body: Any, inputs: Sequence[Origins], prefix: Path, around: _Around
        ) -> list[Origins]:
            known: dict[Var, Origins] = dict.fromkeys(body.constvars, frozenset())
            known.update(zip(body.invars, inputs, strict=True))
            origins = lambda atom: frozenset() if isinstance(atom, Literal) else known[atom]
            for place, eqn in enumerate(body.eqns):
                path, sources = (*prefix, place), tuple(map(origins, eqn.invars))
                if _is_entered(eqn):
                    carries = bodies.carries(eqn) if _compat.name_of(eqn) == "scan" else []
                    inner = list(sources)
                    for into, _ in carries:
                        inner[into] |= {(path, -1 - into)}
                    called = interpreter.open_jaxpr(interpreter.bodies(eqn)[0])
                    outs = walk(called, inner, path, around.inside(eqn, path))
                    for into, out in carries:
                        carried[path, -1 - into] = outs[out]
                        outs[out] |= sources[into]  # of no rounds, a carry is what came in
                else:
                    nodes[path] = Node(path, eqn, sources, around, _is_draw(eqn))
                    outs = [frozenset({(path, number)}) for number in range(len(eqn.outvars))]
                known.update(zip(eqn.outvars, outs, strict=True))
            return list(map(origins, body.outvars))

        body = interpreter.open_jaxpr(jaxpr)
        inputs = [frozenset({((), number)}) for number in range(len(body.invars))]
        results = walk(body, inputs, (), _Around())
        return cls(dict(sorted(nodes.items())), tuple(results), carried)


def _is_entered(eqn: JaxprEqn) -> bool:
    """Whether the equations inside are followed, rather than the equation itself."""
    if _compat.name_of(eqn) == "scan":
        return eqn.params["length"] <= _LONGEST_SCAN
    return record_of(eqn).kind in ("call", "region") and bool(interpreter.bodies(eqn))


def _is_draw(eqn: JaxprEqn) -> bool:
    """Whether random numbers come out, also of a loop that draws."""
    return interpreter.holds(eqn, lambda each: record_of(each).draws)


# The results of equations, `[devices, *rounds, *shape]`.
Records: TypeAlias = dict[Path, list[Any]]
Draws: TypeAlias = Mapping[Path, Sequence[Any]]  # in the same form


class Noise(NamedTuple):
    scale: Any  # 0 moves nothing
    seed: Any  # which way each element goes

    def moved(self, value: Any, size: Any) -> Any:
        """A value, moved by a unit in the last place of `size`."""
        if not _is_float(value):
            return value
        # Each element up or down, by chance and the same in every run.
        number = jnp.arange(max(value.size, 1), dtype=jnp.uint32)[: value.size].reshape(value.shape)
        mixed = (number + jnp.uint32(self.seed) * jnp.uint32(40503)) * jnp.uint32(2654435761)
        mixed = (mixed ^ (mixed >> 15)) * jnp.uint32(2246822519)
        signs = jnp.where((mixed >> 13) & 1, 1.0, -1.0).astype(jnp.float32)
        unit = epsilon(jax.typeof(value).dtype)
        by = jnp.abs(size).astype(jnp.float32) * (unit * self.scale) * signs
        return jnp.where(self.scale > 0, value + by.astype(value.dtype), value)


def _moved_where_rounded(eqn: JaxprEqn, values: Values, outs: Values, noise: Noise) -> Values:
    """The results of an equation, moved if it rounds."""
    record, sizes = record_of(eqn), outs
    if _compat.name_of(eqn) == "convert_element_type":  # only to a type with fewer digits
        before, after = (jnp.result_type(var.aval) for var in (*eqn.invars, *eqn.outvars))
        if not 0 < epsilon(before) < epsilon(after):
            return outs
    elif record.exact or record.draws or record.kind in ("branch", "loop", "collective"):
        return outs  # of one device, a collective adds nothing
    elif record.sums:  # the rounding goes with the terms: the same sum over their sizes
        terms = values
        if all(map(_is_float, values[:1])):
            terms = [jnp.abs(value) if _is_float(value) else value for value in values]
            if any(jnp.iscomplexobj(value) for value in values):
                pairs = zip(terms, values, strict=True)
                terms = [term.astype(jax.typeof(value).dtype) for term, value in pairs]
        sizes = interpreter.replay(eqn, terms)
    return [noise.moved(out, size) for out, size in zip(outs, sizes, strict=True)]


def _is_float(value: Any) -> bool:
    return jnp.issubdtype(jax.typeof(value).dtype, jnp.inexact)


def epsilon(dtype: Any) -> float:
    """The distance from 1 to the next number; 0 of what does not round."""
    return float(jnp.finfo(dtype).eps) if jnp.issubdtype(dtype, jnp.inexact) else 0.0


def evaluate(
    jaxpr: Any,
    args: Sequence[Any],
    *,
    wanted: Callable[[Path], bool],
    draws: Draws | None = None,
    given: Any = True,
    noise: Noise | None = None,
) -> tuple[Values, Records]:
    """The results of a closed jaxpr, and those of the equations that are wanted; under jit.

    `draws` has what devices with own keys get from an equation that draws, by its path; where
    `given` is False, they get what they draw. `noise` says how far every rounded result is moved.
    """
    return _Evaluation(wanted, noise, given).run(jaxpr, args, (), draws or {})


@dataclasses.dataclass(frozen=True, slots=True)
class _Evaluation:
    """What holds for all equations."""

    wanted: Callable[[Path], bool]  # whose results are kept
    noise: Noise | None
    given: Any  # whether draws are; a number of the program, so that both ways are one program
    axes: tuple[Any, ...] = ()  # of the shard_maps around

    def run(
        self, jaxpr: Any, args: Sequence[Any], prefix: Path, draws: Draws
    ) -> tuple[Values, Records]:
        body = interpreter.open_jaxpr(jaxpr)
        known: dict[Var, Any]
        known = dict(zip(body.constvars, interpreter.constants(jaxpr), strict=True))
        known.update(zip(body.invars, args, strict=True))
        records: Records = {}
        for place, eqn in enumerate(body.eqns):
            path = (*prefix, place)
            values = interpreter.read_all(eqn.invars, known)
            if _is_entered(eqn):
                match _compat.name_of(eqn):
                    case "scan":
                        outs, inner = self._scan(eqn, values, path, draws)
                    case "shard_map":
                        outs, inner = self._shard_map(eqn, values, path, draws)
                    case _:
                        outs, inner = self.run(interpreter.bodies(eqn)[0], values, path, draws)
                records.update(inner)
            else:
                outs = self._results(eqn, values, draws.get(path))
                if self.wanted(path):
                    # Devices come first; inside of a shard_map, its vmap puts them there.
                    records[path] = outs if self.axes else [out[None] for out in outs]
            known.update(zip(eqn.outvars, outs, strict=True))
        return interpreter.read_all(body.outvars, known), records

    def _results(self, eqn: JaxprEqn, values: Values, drawn: Sequence[Any] | None) -> Values:
        name, params = _compat.name_of(eqn), eqn.params
        if record_of(eqn).identity:
            return list(values)
        if name == "psum_invariant":  # as vma types know it; a vmap has none
            outs = [lax.psum(value, params["axes"]) for value in values]
        elif name == "all_gather_invariant":
            along, tiled = params["all_gather_dimension"], params["tiled"]
            outs = [lax.all_gather(values[0], params["axis_name"], axis=along, tiled=tiled)]
        else:
            outs = interpreter.replay(eqn, values)
        if drawn is not None and _is_draw(eqn):
            own = self._differ(values) & self.given
            outs = [
                out if _is_key(out) else jnp.where(own, instead, out)
                for out, instead in zip(outs, drawn, strict=True)
            ]
        if self.noise is not None:
            outs = _moved_where_rounded(eqn, values, outs, self.noise)
        return outs

    def _differ(self, values: Values) -> Any:
        """Whether the keys among the operands of a draw are not the same on all devices."""
        different = jnp.zeros((), bool)
        for value in values:
            if _is_key(value) or jax.typeof(value).dtype == jnp.uint32:
                data = jax.random.key_data(value) if _is_key(value) else value
                different |= jnp.any(lax.pmax(data, self.axes) != lax.pmin(data, self.axes))
        return different

    def _scan(
        self, eqn: JaxprEqn, values: Values, path: Path, draws: Draws
    ) -> tuple[Values, Records]:
        """Again a scan; what its rounds record is stacked behind the devices."""
        params = eqn.params
        layout = _compat.scan_layout(params, len(values), len(eqn.outvars))
        sliced = [n for n in range(len(values)) if n not in {*layout.constants, *layout.carries_in}]
        behind = 0 if self.axes else 1  # where the rounds are in what is drawn for this loop
        of_loop = {
            at: [jnp.moveaxis(each, behind, 0) for each in given]
            for at, given in draws.items()
            if at[: len(path)] == path
        }

        def step(carry: Values, xs: tuple[Values, dict]) -> tuple[Values, tuple[Values, Records]]:
            row, drawn = xs
            inputs: Values = list(values)
            for numbers, parts in ((layout.carries_in, carry), (sliced, row)):
                for number, part in zip(numbers, parts, strict=True):
                    inputs[number] = part
            outs, kept = self.run(params["jaxpr"], inputs, path, drawn)
            stacked = [out for n, out in enumerate(outs) if n not in layout.carries_out]
            return [outs[n] for n in layout.carries_out], (stacked, kept)

        carry, (stacked, kept) = lax.scan(
            step,
            [values[n] for n in layout.carries_in],
            ([values[n] for n in sliced], of_loop),
            length=params["length"],
            reverse=params["reverse"],
        )
        carries, rest = iter(carry), iter(stacked)
        outs = [next(carries if n in layout.carries_out else rest) for n in range(len(eqn.outvars))]
        return outs, jax.tree.map(lambda each: jnp.moveaxis(each, 0, behind), kept)

    def _shard_map(
        self, eqn: JaxprEqn, values: Values, path: Path, draws: Draws
    ) -> tuple[Values, Records]:
        """Its body on all devices together, which come first in every value."""
        params, axes = eqn.params, manual_axes(eqn)
        inner = dataclasses.replace(self, axes=(*self.axes, *axes))
        mapped: Callable = lambda blocks, drawn: inner.run(params["jaxpr"], blocks, path, drawn)
        for name in reversed(list(axes)):  # of several axes, one after the other
            mapped = jax.vmap(mapped, axis_name=name, axis_size=axes[name])
        pairs = zip(values, params["in_specs"], strict=True)
        blocks = [_cut(value, spec, axes) for value, spec in pairs]
        of_body = {at: given for at, given in draws.items() if at[: len(path)] == path}
        sizes = tuple(axes.values())
        spread = jax.tree.map(lambda each: each.reshape(*sizes, *each.shape[1:]), of_body)
        outs, kept = mapped(blocks, spread)
        merged = jax.tree.map(lambda each: each.reshape(-1, *each.shape[len(sizes) :]), kept)
        pairs = zip(outs, params["out_specs"], strict=True)
        return [_joined(out, spec, axes) for out, spec in pairs], merged


def _is_key(value: Any) -> bool:
    return jnp.issubdtype(jax.typeof(value).dtype, jax.dtypes.prng_key)


def manual_axes(eqn: JaxprEqn) -> dict[Any, int]:
    """The axes of a shard_map with their sizes, in the order of its mesh."""
    new, sizes = _compat.newly_manual_axes(eqn), dict(eqn.params["mesh"].shape)
    return {name: size for name, size in sizes.items() if name in new}


def _cut(value: Any, spec: Any, axes: Mapping[Any, int]) -> Any:
    """`[*s]` -> one block for each device, `[*axes, *block]`."""
    shape: list[int] = []
    at: dict[Any, int] = {}  # where each axis lies in the split shape
    for size, part in zip(value.shape, _parts(spec, value.ndim), strict=True):
        for name in part:
            at[name] = len(shape)
            shape.append(axes[name])
        shape.append(size // math.prod(axes[name] for name in part))
    front = [at[name] for name in axes if name in at]
    split = jnp.moveaxis(value.reshape(shape), front, range(len(front)))
    split = jnp.expand_dims(split, [n for n, name in enumerate(axes) if name not in at])
    return jnp.broadcast_to(split, (*axes.values(), *split.shape[len(axes) :]))


def _joined(value: Any, spec: Any, axes: Mapping[Any, int]) -> Any:
    """The opposite; along axes that cut nothing, what the first device has."""
    parts = _parts(spec, value.ndim - len(axes))
    cut = {name for part in parts for name in part}
    value = value[tuple(slice(None) if name in cut else 0 for name in axes)]
    left = [name for name in axes if name in cut]
    order, shape = [], []
    for number, part in enumerate(parts, len(left)):
        order += [*map(left.index, part), number]
        shape.append(value.shape[number] * math.prod(axes[name] for name in part))
    return value.transpose(order).reshape(shape)


def _parts(spec: Any, rank: int) -> list[tuple[Any, ...]]:
    """The names that cut each dimension."""
    return [*map(interpreter.names_of, spec), *[()] * (rank - len(spec))]
