"""What is suspect in a program and is left to the user: noise that repeats, sums done twice.

Random numbers may repeat on every device, or differ where they should not (JXD501, JXD502). A draw
with a key that all devices share gives all of them the same numbers. That is right for a mask of
the weights, or a population of which each device takes its share. It is wrong where the numbers
meet, element by element, data that differ between the devices: then each device adds the same noise
to rows of its own. So a draw is followed for as long as it is only scaled and shaped.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

from jax.extend.core import JaxprEqn, Literal, Var

from jax_dist import _codes, _compat
from jax_dist._rewrite import interpreter
from jax_dist._rewrite.pipeline import PassFinding
from jax_dist._rewrite.primitive_facts import record_of
from jax_dist._rewrite.uniformity import NOWHERE, Invariance, Same, cut_along


@dataclasses.dataclass(frozen=True, slots=True)
class _Noise:
    """A value that is a draw, scaled and shaped at most."""

    line: str  # of the draw
    alike: Same  # the axes along which all devices draw the same
    dims: frozenset[int]  # along which its elements were drawn one by one


@dataclasses.dataclass(frozen=True, slots=True)
class _Known:
    """What is known of one value."""

    noise: _Noise | None = None
    flat: frozenset[int] = frozenset()  # dimensions along which all elements are equal
    drawn: str = ""  # the line of a draw with a key of the device's own, that it depends on


_NOTHING = _Known()


def find_hazards(jaxpr: Any) -> tuple[PassFinding, ...]:
    """What is suspect in a program, a closed jaxpr: first sums, then draws."""
    return (*_doubled_sums(jaxpr), *_noise(jaxpr))


def _noise(jaxpr: Any) -> tuple[PassFinding, ...]:
    """What the draws of a program say about its devices."""
    walk = _Walk()
    body = interpreter.open_jaxpr(jaxpr)
    walk.body(body, [NOWHERE] * len(body.invars), [_NOTHING] * len(body.invars), NOWHERE, "")
    return tuple(dict.fromkeys(walk.findings))


class _Walk:
    """Goes through the bodies of a program once, and notes what it finds."""

    def __init__(self) -> None:
        self.findings: list[PassFinding] = []
        self._invariance = Invariance()

    def body(
        self, body: Any, ins: Sequence[Same], known: Sequence[_Known], scope: Same, around: str
    ) -> list[_Known]:
        """What is known of the results of a body.

        Args:
          body: an open jaxpr.
          ins: of each input, along which axes it is the same.
          known: of each input.
          scope: the axes around the body.
          around: the line of the call, for equations that have none of the user's.
        """
        facts = self._invariance.facts(body, ins, scope)
        values: dict[Var, _Known] = dict(zip(body.invars, known, strict=True))
        for eqn in body.eqns:
            line = interpreter.source_line(eqn) or around
            same = [self._invariance.same_of(atom, facts, scope) for atom in eqn.invars]
            given = [_of(atom, values) for atom in eqn.invars]
            outs = self._results(eqn, same, given, scope, line)
            values.update(zip(eqn.outvars, outs, strict=True))
        return [_of(atom, values) for atom in body.outvars]

    def _results(
        self, eqn: JaxprEqn, same: list[Same], given: list[_Known], scope: Same, line: str
    ) -> list[_Known]:
        record = record_of(eqn)
        drawn = next((each.drawn for each in given if each.drawn), "")
        every = frozenset(range(len(_shape(eqn.outvars[0])))) if eqn.outvars else frozenset()
        if record.draws and record.kind == "plain":
            alike = scope.intersection(*same)
            own = line if alike != scope else drawn
            return [_Known(_Noise(line, alike, every), drawn=own)] * len(eqn.outvars)
        if interpreter.bodies(eqn):
            return self._inside(eqn, same, given, scope, line)
        if record.elementwise:
            # A number beside an array counts for all of its elements.
            given = [
                each if _shape(atom) else dataclasses.replace(each, flat=every)
                for atom, each in zip(eqn.invars, given, strict=True)
            ]
            self._meet(eqn, same, given)
        noise, flat = _followed(eqn, same, given)
        return [_Known(noise, flat, drawn)] * len(eqn.outvars)

    def _inside(
        self, eqn: JaxprEqn, same: list[Same], given: list[_Known], scope: Same, line: str
    ) -> list[_Known]:
        kind, bodies = record_of(eqn).kind, interpreter.bodies(eqn)
        inputs = self._invariance.of_body_inputs(eqn, same, scope)
        inner = self._invariance.inside(eqn, scope)
        followed = kind in ("call", "region")
        drawn = next((each.drawn for each in given if each.drawn), "")
        for body, ins in zip(bodies, inputs, strict=True):
            opened = interpreter.open_jaxpr(body)
            known = given if followed else [_Known(drawn=drawn)] * len(ins)
            outs = self.body(opened, ins, known, inner, line)
            if kind == "region":
                self._leave(eqn, opened, ins, outs, inner)
            if followed and len(outs) == len(eqn.outvars):
                return outs if kind == "call" else [_NOTHING] * len(outs)
            drawn = drawn or next((each.drawn for each in outs if each.drawn), "")
        return [_Known(drawn=drawn)] * len(eqn.outvars)

    def _meet(self, eqn: JaxprEqn, same: list[Same], given: list[_Known]) -> None:
        """Notes noise that all devices share with data that differ, element by element."""
        draws = [(each.noise, each.flat) for each in given if each.noise is not None]
        for noise, flat in draws:
            for atom, alike, other in zip(eqn.invars, same, given, strict=True):
                apart = noise.alike - alike
                own = {dim for dim, size in enumerate(_shape(atom)) if size > 1} - other.flat
                # One mask for all rows of a device is one for all rows: that is meant.
                if apart and own & noise.dims and not own & flat and other.noise is None:
                    over = _named(apart)
                    finding = PassFinding(
                        _codes.REPEATED_NOISE,
                        "noted",
                        f"all devices along {over} draw the same numbers, and each meets data of "
                        "its own",
                        "the key is the same on all of them; random.fold_in(key, "
                        f"lax.axis_index({over})) gives each its own, unless equal noise is meant",
                        noise.line,
                    )
                    self.findings.append(finding)

    def _leave(
        self, eqn: JaxprEqn, body: Any, ins: Sequence[Same], outs: list[_Known], scope: Same
    ) -> None:
        """Notes noise of the device's own in results that are said to be the same everywhere."""
        facts = self._invariance.facts(body, ins, scope)
        new = _compat.newly_manual_axes(eqn)
        for atom, spec, out in zip(body.outvars, eqn.params["out_specs"], outs, strict=True):
            apart = new - cut_along(spec) - self._invariance.same_of(atom, facts, scope)
            if apart and out.drawn:
                finding = PassFinding(
                    _codes.DRIFTING_COPIES,
                    "noted",
                    f"a result that is said to be the same along {_named(apart)} has noise of each "
                    "device's own",
                    "out_specs does not name the axis, so what one device has is taken for all; "
                    "draw with a key that all devices share, or reduce over the axis",
                    out.drawn,
                )
                self.findings.append(finding)


def _of(atom: Any, values: dict[Var, _Known]) -> _Known:
    if isinstance(atom, Literal):
        return _Known(flat=frozenset(range(len(_shape(atom)))))
    return values.get(atom, _NOTHING)


def _followed(
    eqn: JaxprEqn, same: list[Same], given: list[_Known]
) -> tuple[_Noise | None, frozenset[int]]:
    """The noise that a result still is, and the dimensions along which it is constant."""
    name, record = _compat.name_of(eqn), record_of(eqn)
    if record.elementwise or record.identity:
        flat = frozenset.intersection(*[each.flat for each in given])
        return _scaled(same, given), flat
    if name == "broadcast_in_dim":
        kept = eqn.params["broadcast_dimensions"]
        shape, before = _shape(eqn.outvars[0]), _shape(eqn.invars[0])
        stretched = {new for old, new in enumerate(kept) if before[old] != shape[new]}
        flat = frozenset(range(len(shape))) - set(kept) | stretched
        flat |= {kept[old] for old in given[0].flat}
        return _moved(given[0].noise, {old: new for old, new in enumerate(kept)}, stretched), flat
    if name == "transpose":
        places = {old: new for new, old in enumerate(eqn.params["permutation"])}
        return _moved(given[0].noise, places, set()), frozenset(places[o] for o in given[0].flat)
    if name in ("reshape", "squeeze") and given[0].noise is not None:
        noise, before = given[0].noise, _shape(eqn.invars[0])
        if all(dim in noise.dims for dim, size in enumerate(before) if size > 1):
            dims = frozenset(range(len(_shape(eqn.outvars[0]))))
            return dataclasses.replace(noise, dims=dims), frozenset()
    return None, frozenset()


def _scaled(same: list[Same], given: list[_Known]) -> _Noise | None:
    """Noise stays noise along the dimensions in which all that it meets is constant."""
    noises = [each.noise for each in given if each.noise is not None]
    if not noises:
        return None
    dims, alike = noises[0].dims, noises[0].alike
    for axes, each in zip(same, given, strict=True):
        alike &= axes
        dims &= each.flat if each.noise is None else each.noise.dims
    return dataclasses.replace(noises[0], dims=dims, alike=alike) if dims and alike else None


def _moved(noise: _Noise | None, places: dict[int, int], gone: set[int]) -> _Noise | None:
    if noise is None:
        return None
    return dataclasses.replace(noise, dims=frozenset(places[dim] for dim in noise.dims) - gone)


def _shape(atom: Any) -> tuple[int, ...]:
    return tuple(getattr(atom.aval, "shape", ()))


def _named(axes: Same) -> str:
    return ", ".join(sorted(map(repr, axes)))


# --- gradients that are summed over devices twice (JXD303)
#
# In a shard_map with vma types, the gradient by a value that is the same on all devices comes out
# summed: JAX put a psum there, in transposing. A psum of the user's own then sums equal values, and
# a pmean leaves the sum as it is: N times what the same body gives under pmap.


_IsTransposed = Callable[[JaxprEqn], bool]  # whether JAX made the equation in transposing


class _Summed(NamedTuple):
    """What is known of one value."""

    axes: frozenset = frozenset()  # over which JAX has summed it
    # Whether it comes from the cotangent of a sum of the user's own. Such a loss is that of all
    # devices, and so is its gradient, which a pmean leaves right.
    of_sum: bool = False


_Sums: TypeAlias = dict[Any, _Summed]  # of the variables of one body


def _joined(known: _Sums, atoms: Sequence[Any]) -> _Summed:
    each = [known.get(atom, _Summed()) for atom in atoms if isinstance(atom, Var)]
    return _Summed(frozenset().union(*[one.axes for one in each]), any(one.of_sum for one in each))


def _doubled_sums(jaxpr: Any) -> tuple[PassFinding, ...]:
    """The sums over devices of what JAX has summed over the same devices already."""
    found = [
        finding
        for eqn in interpreter.equations(jaxpr)
        if record_of(eqn).kind == "region" and eqn.params["check_vma"]
        for finding in _sums_in_body(
            eqn.params["jaxpr"], {}, interpreter.source_line(eqn), _by_name
        )
    ]
    return tuple(dict.fromkeys(found))


def _sums_in_body(
    body: Any, known: _Sums, around: str, is_transposed: _IsTransposed
) -> Iterator[PassFinding]:
    for eqn in interpreter.open_jaxpr(body).eqns:
        record, by_jax = record_of(eqn), is_transposed(eqn)
        axes, of_sum = _joined(known, eqn.invars)
        where = interpreter.source_line(eqn) or around
        if record.over == "sum" and by_jax:
            summed = frozenset() if of_sum else frozenset(eqn.params["axes"])
            known.update(dict.fromkeys(eqn.outvars, _Summed(summed, of_sum)))
        elif record.over == "sum" and (twice := axes & set(eqn.params["axes"])):
            over = ", ".join(f"'{axis}'" for axis in sorted(map(str, twice)))
            yield PassFinding(
                _codes.GRAD_PSUM_WITH_VMA,
                "noted",
                f"a gradient is summed over {over} a second time, and comes out too large",
                "under check_vma=True, JAX sums the gradient by a value that all devices share; "
                "say check_vma=False, or pcast the value to varying before the gradient",
                where,
            )
        else:
            # In transposing, a psum of the user's becomes a pvary.
            of_sum |= by_jax and _compat.name_of(eqn) == "pvary" and isinstance(eqn.invars[0], Var)
            made = _Summed(axes if record.linear else frozenset(), of_sum)
            known.update(dict.fromkeys(eqn.outvars, made))
        for inner in interpreter.bodies(eqn):
            inside = _in_transposed(eqn, inner) if by_jax else _by_name
            yield from _sums_through(eqn, inner, known, where, inside)


def _by_name(eqn: JaxprEqn) -> bool:
    """The name stack says so, outside of what was transposed as a whole."""
    return "transpose(" in str(eqn.source_info.name_stack)


def _in_transposed(eqn: JaxprEqn, body: Any) -> _IsTransposed:
    """What is in the body of a call or loop was transposed with it; the name stacks are new."""
    if record_of(eqn).call != "checkpoint":
        return lambda _: True
    # A remat computes forward once more; what it transposes comes from the cotangents, its last
    # operands.
    opened = interpreter.open_jaxpr(body)
    reached = {opened.invars[-1]}

    def is_reached(eqn: JaxprEqn) -> bool:
        return any(isinstance(atom, Var) and atom in reached for atom in eqn.invars)

    for inner in opened.eqns:
        if is_reached(inner):
            reached.update(inner.outvars)
    return is_reached


def _sums_through(
    eqn: JaxprEqn, inner: Any, known: _Sums, around: str, is_transposed: _IsTransposed
) -> Iterator[PassFinding]:
    """The same in a body; what goes in and comes out of a jit, remat or scan is followed."""
    opened = interpreter.open_jaxpr(inner)
    outer = eqn.invars[1:] if record_of(eqn).kind == "branch" else eqn.invars
    inside: _Sums = {}
    if len(opened.invars) == len(outer):
        pairs = zip(opened.invars, outer, strict=True)
        inside = {var: _joined(known, [atom]) for var, atom in pairs}
    yield from _sums_in_body(inner, inside, around, is_transposed)
    if len(opened.outvars) == len(eqn.outvars):
        for result, atom in zip(eqn.outvars, opened.outvars, strict=True):
            before, found = _joined(known, [result]), _joined(inside, [atom])
            known[result] = _Summed(before.axes | found.axes, before.of_sum or found.of_sum)
