"""Walks over the equations of a jaxpr, and evaluates them.

What comes in is a jaxpr and its values; what goes out is the values that JAX would have given. A
pass says for chosen equations what to do instead. No equation is ever left out silently.
"""

import contextlib
import dataclasses
import functools
import itertools
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import jax
from jax.core import eval_jaxpr
from jax.extend import core, source_info_util
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var
from jax.sharding import AxisType

from jax_dist import _compat
from jax_dist.errors import display_path

# --- walks a jaxpr again, equation by equation, and lets a pass put something else in its place
#
# An untouched equation is replayed with its context, source line, name stack and effects. A body
# (of scan, cond, jit, ...) is replaced by one that was traced again, with identical types, so
# nothing needs to be known of the primitive around it. shard_map is called again through the
# public `jax.shard_map`, so JAX types it.


Atom: TypeAlias = Any  # Var | Literal, of which pyright says "partially unknown"
Values: TypeAlias = list[Any]  # of the atoms of an equation, in order
Handler: TypeAlias = Callable[[JaxprEqn, Values], Values]


def open_jaxpr(jaxpr: Any) -> Jaxpr:
    """The jaxpr without its constants, whether it came with them or not."""
    return getattr(jaxpr, "jaxpr", jaxpr)


def constants(jaxpr: Any) -> Sequence[Any]:
    """The constants of a jaxpr; none for an open one."""
    return getattr(jaxpr, "consts", ())


def bodies(eqn: JaxprEqn) -> list[Any]:
    """The jaxprs among the parameters of an equation, open or closed, in order."""
    values = eqn.params.values()
    parts = (value if isinstance(value, (tuple, list)) else (value,) for value in values)
    return [part for several in parts for part in several if _is_body(part)]


def names_of(part: Any) -> tuple[Any, ...]:
    """The axes that one part of a spec, or a parameter of a collective, names."""
    return tuple(part) if isinstance(part, tuple | list) else () if part is None else (part,)


def named_axes(eqn: JaxprEqn) -> tuple[Any, ...]:
    """The mesh axes that an equation names, outermost first: of collectives, nearly always."""
    named = names_of(eqn.params.get("axes", eqn.params.get("axis_name", ())))
    return tuple(name for name in named if name is not None and not isinstance(name, int))


def equations(jaxpr: Any) -> Iterator[JaxprEqn]:
    """All equations, those of bodies after the one that holds them."""
    for eqn in open_jaxpr(jaxpr).eqns:
        yield eqn
        for body in bodies(eqn):
            yield from equations(body)


def contains(jaxpr: Any, wanted: Callable[[JaxprEqn], bool]) -> bool:
    """Whether any equation, at any depth, is wanted."""
    return any(wanted(eqn) for eqn in equations(jaxpr))


def holds(eqn: JaxprEqn, wanted: Callable[[JaxprEqn], bool]) -> bool:
    """Whether an equation is wanted, or any in its bodies, at any depth."""
    return wanted(eqn) or any(contains(body, wanted) for body in bodies(eqn))


def run(
    jaxpr: Any,
    args: Sequence[Any],
    handlers: Mapping[int, Handler],
    *,
    consts: Sequence[Any] | None = None,
    anew: bool = False,
) -> Values:
    """Evaluates a jaxpr on `args`, with some equations handled otherwise.

    Args:
      jaxpr: with its constants, or without if it has none.
      args: one for each input variable.
      handlers: by the place of the equation in the jaxpr; the others are replayed.
      consts: instead of the constants of the jaxpr.
      anew: whether handlers run in the context of now, instead of that of their equation.
    """
    body = open_jaxpr(jaxpr)
    consts = constants(jaxpr) if consts is None else consts
    if not handlers:
        return _evaluate(body, consts, args)
    known: dict[Var, Any] = dict(zip(body.constvars, consts, strict=True))
    known.update(zip(body.invars, args, strict=True))
    # The place of the last equation that reads each variable; past all for the results.
    last_read: dict[Any, int] = {
        atom: place
        for place, eqn in enumerate(body.eqns)
        for atom in eqn.invars
        if isinstance(atom, Var)
    }
    last_read |= {atom: len(body.eqns) for atom in body.outvars if isinstance(atom, Var)}
    start = 0
    for place in [*sorted(handlers), len(body.eqns)]:
        _replay_stretch(body, start, place, known, last_read)
        if place < len(body.eqns):
            eqn = body.eqns[place]
            with located(eqn, anew=anew):
                outs = handlers[place](eqn, read_all(eqn.invars, known))
            known.update(zip(eqn.outvars, outs, strict=True))
        start = place + 1
    return read_all(body.outvars, known)


def read_all(atoms: Sequence[Atom], known: Mapping[Var, Any]) -> Values:
    return [atom.val if isinstance(atom, Literal) else known[atom] for atom in atoms]


def _replay_stretch(
    body: Jaxpr, start: int, stop: int, known: dict[Var, Any], last_read: Mapping[Any, int]
) -> None:
    """Replays the equations from `start` to `stop`, and adds what is read later to `known`."""
    eqns = body.eqns[start:stop]
    if not eqns:
        return
    inside = {var for eqn in eqns for var in eqn.outvars}
    made = [var for eqn in eqns for var in eqn.outvars if last_read.get(var, -1) >= stop]
    read = {
        atom: None  # a dict, for its order
        for eqn in eqns
        for atom in eqn.invars
        if not isinstance(atom, Literal) and atom not in inside
    }
    effects = frozenset().union(*[eqn.effects for eqn in eqns])
    stretch = Jaxpr((), list(read), made, eqns, effects, unnamed())
    outs = _evaluate(stretch, (), [known[var] for var in read])
    known.update(zip(made, outs, strict=True))


# From this many equations on, a stretch becomes one call of what is traced already: to bind an
# equation again takes about as long as to trace it for the first time.
_LONG = 64


def _evaluate(body: Jaxpr, consts: Sequence[Any], args: Sequence[Any]) -> Values:
    if len(body.eqns) < _LONG:
        return eval_jaxpr(body, consts, *args)
    return call_jaxpr(core.ClosedJaxpr(body, consts), args)


def replay(eqn: JaxprEqn, values: Sequence[Any]) -> Values:
    """Binds one equation to other values, of other shapes if need be."""
    invars: list[Any] = [Var(jax.typeof(value)) for value in values]
    outvars = [Var(var.aval) for var in eqn.outvars]  # what nobody reads, too
    moved = eqn.replace(invars=invars, outvars=outvars)
    single = Jaxpr((), invars, outvars, [moved], eqn.effects, unnamed())
    return eval_jaxpr(single, (), *values)


def call_jaxpr(jaxpr: core.ClosedJaxpr, values: Sequence[Any]) -> Values:
    """Evaluate a jaxpr as one call: none of its equations is traced again."""
    return replay(_compat.call_of(jaxpr), values)


def with_params(eqn: JaxprEqn, params: dict[str, Any]) -> JaxprEqn:
    return eqn.replace(params={**eqn.params, **params})


def with_bodies(eqn: JaxprEqn, change: Callable[[Any], Any]) -> JaxprEqn:
    """The equation with each of its bodies changed to one of the same types."""

    def changed(value: Any) -> Any:
        if isinstance(value, (tuple, list)) and any(map(_is_body, value)):
            return jax.tree.map(changed, value)  # a named tuple stays one
        return change(value) if _is_body(value) else value

    return eqn.replace(params={name: changed(value) for name, value in eqn.params.items()})


def replay_with(eqn: JaxprEqn, change: Callable[[Any], Any], values: Sequence[Any]) -> Values:
    """Binds an equation with each of its bodies changed to one of the same types.

    Where a body has no place for the constants that `change` may give it, they become operands.
    """
    operands = list(values)

    def changed(body: Any) -> Any:
        new = change(body)
        if not constants(new):
            return in_form_of(body, new)
        if _compat.name_of(eqn) == "remat2":
            operands[:0] = new.consts
            inner = open_jaxpr(new)
            inputs = [*inner.constvars, *inner.invars]
            return Jaxpr((), inputs, inner.outvars, inner.eqns, inner.effects, unnamed())
        if isinstance(body, core.ClosedJaxpr):
            return new
        raise NotImplementedError(
            f"the body of {_compat.name_of(eqn)} ({source_line(eqn) or 'unknown line'}) captures"
            " arrays and cannot be traced again; pass them to it as arguments"
        )

    changed_eqn = with_bodies(eqn, changed)
    return replay(changed_eqn, operands)


def _trace_again(jaxpr: Any, evaluate: Callable[..., Values]) -> core.ClosedJaxpr:
    """A jaxpr of the same inputs and outputs, traced from `evaluate`.

    Called where the body will stand, so inside the shard_map around it, whose axes it may use.
    """
    wanted = open_jaxpr(jaxpr)
    new = jax.make_jaxpr(evaluate)(*wanted.in_avals)
    for before, after in ((wanted.in_avals, new.in_avals), (wanted.out_avals, new.out_avals)):
        if list(map(_type, before)) != list(map(_type, after)):
            raise AssertionError(f"a rewritten body has other types: {before} became {after}")
    return new


def in_form_of(jaxpr: Any, new: Any) -> Any:
    """`new`, open or closed as `jaxpr` is."""
    if isinstance(jaxpr, core.ClosedJaxpr):
        return new
    if constants(new):
        raise AssertionError("a rewritten body has constants, and there is no place for them")
    return open_jaxpr(new)


def call_shard_map(eqn: JaxprEqn, evaluate: Callable[..., Values], values: Values) -> Values:
    """The shard_map of `eqn` around another body, `evaluate(*blocks)`."""
    params = eqn.params
    is_inside = AxisType.Manual in jax.sharding.get_abstract_mesh().axis_types
    mapped = jax.shard_map(
        _standing_for(params["jaxpr"], evaluate),
        # Inside another shard_map, the mesh of the context says which axes are manual already.
        mesh=None if is_inside else params["mesh"],
        in_specs=tuple(params["in_specs"]),
        out_specs=list(params["out_specs"]),
        axis_names=set(eqn.params["newly_manual_axes"]),
        check_vma=params["check_vma"],
    )
    return mapped(*values)


def _standing_for(body: Any, evaluate: Callable[..., Values]) -> Callable[..., Values]:
    """`evaluate`, which JAX takes to be defined where the body was: a pmap is known by that."""

    def standing(*blocks: Any) -> Values:
        return evaluate(*blocks)

    found = _DEFINED.fullmatch(str(open_jaxpr(body).debug_info.func_src_info))
    if found is not None:
        defined = lambda *blocks: blocks  # never called; JAX reads its code's name and place
        line = int(found["line"])
        defined.__code__ = defined.__code__.replace(co_filename=found["file"], co_firstlineno=line)
        defined.__name__ = found["name"]
        standing.__wrapped__ = defined  # pyright: ignore[reportFunctionMemberAccess]
    return standing


@contextlib.contextmanager
def located(eqn: JaxprEqn, *, anew: bool = False) -> Iterator[None]:
    """What is traced here gets the source line and the name stack of `eqn`, and its context."""
    info = eqn.source_info
    names = source_info_util.current_name_stack() + info.name_stack
    context = contextlib.nullcontext() if anew else eqn.ctx.manager
    with source_info_util.user_context(info.traceback, name_stack=names), context:
        yield


def context_here() -> Any:
    """The context that JAX gives to an equation that is traced now."""
    return jax.make_jaxpr(jax.lax.neg)(1.0).eqns[0].ctx


def source_line(eqn: JaxprEqn) -> str:
    """Where the user's code makes this equation: "train.py:12", or "" if that is unknown."""
    found = _SUMMARY.match(source_info_util.summarize(eqn.source_info))
    return "" if found is None else f"{display_path(found['file'])}:{found['line']}"


_DEFINED = re.compile(r"(?P<name>\S+) at (?P<file>.+):(?P<line>\d+)")  # "body at spread.py:47"
_SUMMARY = re.compile(r"(?P<file>.+?):(?P<line>\d+)(:\d+)? \(")  # "train.py:12:4 (step)"
# Lines of our own are not the user's, neither in reports nor in the programs that we emit.
OURS, _OF_JAX = (
    os.path.dirname(os.path.abspath(path)) + os.sep
    for path in (os.path.dirname(__file__), jax.__file__)
)
OURS_AND_JAX = (OURS, _OF_JAX)
source_info_util.register_exclusion(OURS)
# And `jax.debug.breakpoint` passes the variables of all frames but these into the program.
_compat.hide_frames(OURS)


def _type(aval: Any) -> tuple:
    """What must not change; on Auto axes, a mesh in the type is not part of it."""
    return aval.shape, aval.dtype, aval.weak_type, aval.manual_axis_type


@functools.cache
def unnamed() -> Any:
    """What a jaxpr says of its function, for one that has none; its class is not public in 0.7."""
    made: Any = jax.make_jaxpr(lambda: ())().jaxpr.debug_info
    return made._replace(
        traced_for="rewriting", func_src_info="jax_dist", arg_names=None, result_paths=None
    )


def as_typed(value: Any, atom: Any) -> Any:
    """The value with the type of `atom`, which may be typed as varying where the value is not."""
    missing = _compat.varying_axes(atom.aval) - _compat.varying_axes(jax.typeof(value))
    axes = tuple(sorted(missing, key=str))
    return jax.lax.pcast(value, axes, to="varying") if missing else value


def _is_body(value: Any) -> bool:
    return isinstance(value, (Jaxpr, core.ClosedJaxpr))


# --- equations at any depth of a jaxpr, each named by the path to it, and replaced there


Path: TypeAlias = tuple[int, ...]  # number of an equation, of a body in it, of an equation, ...


@dataclasses.dataclass(frozen=True, slots=True)
class EquationPlace:
    """One equation, and what stands around it."""

    path: Path
    eqn: JaxprEqn
    within: Jaxpr  # which has it among its equations
    around: tuple[JaxprEqn, ...] = ()  # outermost first

    @property
    def line(self) -> str:
        """Of the user: those inside a jit know only lines inside it."""
        lines = map(source_line, (self.eqn, *reversed(self.around)))
        return next(filter(None, lines), "")


def places(jaxpr: Any, wanted: Callable[[JaxprEqn], bool]) -> Iterator[EquationPlace]:
    """The wanted equations in program order; the bodies of a wanted one are not searched."""
    within = open_jaxpr(jaxpr)
    for number, eqn in enumerate(within.eqns):
        if wanted(eqn):
            yield EquationPlace((number,), eqn, within)
            continue
        for part, body in enumerate(bodies(eqn)):
            for inner in places(body, wanted):
                path, around = (number, part, *inner.path), (eqn, *inner.around)
                yield dataclasses.replace(inner, path=path, around=around)


def run_at(jaxpr: Any, args: Sequence[Any], handlers: Mapping[Path, Handler]) -> Values:
    """Evaluates a jaxpr as `run` does, with equations handled at any depth, by their paths."""

    def run_within(deeper: Mapping[Path, Handler], eqn: JaxprEqn, values: Values) -> Values:
        inside = bodies(eqn)
        evaluates = {
            part: lambda *args, body=inside[part], inner=inner: run_at(body, args, inner)
            for part, inner in _by_first(deeper).items()
        }
        return run_bodies(evaluates, eqn, values)

    here: dict[int, Handler] = {}
    for number, deeper in _by_first(handlers).items():
        here[number] = deeper[()] if () in deeper else functools.partial(run_within, deeper)
    return run(jaxpr, args, here)


def _by_first(handlers: Mapping[Path, Handler]) -> dict[int, dict[Path, Handler]]:
    grouped: dict[int, dict[Path, Handler]] = {}
    for path, handler in handlers.items():
        grouped.setdefault(path[0], {})[path[1:]] = handler
    return grouped


def run_bodies(
    evaluates: Mapping[int, Callable[..., Values]], eqn: JaxprEqn, values: Values
) -> Values:
    """Binds an equation with some of its bodies, by number, traced again; the others stay."""
    if _compat.name_of(eqn) == "shard_map":
        return call_shard_map(eqn, evaluates[0], values)
    numbers = itertools.count()

    def changed(body: Any) -> Any:
        evaluate = evaluates.get(next(numbers))
        return body if evaluate is None else _trace_again(body, evaluate)

    return replay_with(eqn, changed, values)
