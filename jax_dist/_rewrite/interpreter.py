"""Evaluation of jaxprs, with chosen equations handled otherwise.

An untouched equation is replayed with its context, source line, name stack and effects. A body (of
scan, cond, jit, ...) is replaced by one that was traced again, with identical types, so nothing
needs to be known of the primitive around it. shard_map is called again through the public
`jax.shard_map`, so JAX types it.
"""

import contextlib
import dataclasses
import functools
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
from jax_dist._rewrite.primitive_facts import record_of
from jax_dist.errors import display_path

Atom: TypeAlias = Any  # Var | Literal, of which pyright says "partially unknown"
Values: TypeAlias = list[Any]  # of the atoms of an equation, in order
Handler: TypeAlias = Callable[[JaxprEqn, Values], Values]

_JAXPRS = (Jaxpr, core.ClosedJaxpr)


def open_jaxpr(jaxpr: Any) -> Jaxpr:
    """Return the jaxpr without its constants, whether it came with them or not."""
    return getattr(jaxpr, "jaxpr", jaxpr)


def constants(jaxpr: Any) -> Sequence[Any]:
    """Return the constants of a jaxpr; none for an open one."""
    return getattr(jaxpr, "consts", ())


def bodies(eqn: JaxprEqn) -> list[Any]:
    """Return the jaxprs among the parameters of an equation, open or closed, in order."""
    inner = []
    for value in eqn.params.values():
        if isinstance(value, _JAXPRS):
            inner.append(value)
        elif isinstance(value, tuple | list):
            inner += [part for part in value if isinstance(part, _JAXPRS)]
    return inner


def names_of(part: Any) -> tuple[Any, ...]:
    """Return the axes that one part of a spec, or a parameter of a collective, names."""
    return tuple(part) if isinstance(part, tuple | list) else () if part is None else (part,)


def named_axes(eqn: JaxprEqn) -> tuple[Any, ...]:
    """Return the mesh axes that an equation names, outermost first: of collectives, mostly."""
    named = names_of(eqn.params.get("axes", eqn.params.get("axis_name", ())))
    return tuple(name for name in named if name is not None and not isinstance(name, int))


def equations(jaxpr: Any) -> Iterator[JaxprEqn]:
    """Yield all equations, those of bodies after the one that holds them."""
    for eqn in open_jaxpr(jaxpr).eqns:
        yield eqn
        for body in bodies(eqn):
            yield from equations(body)


def contains(jaxpr: Any, wanted: Callable[[JaxprEqn], bool]) -> bool:
    """Return whether any equation, at any depth, is wanted."""
    return any(map(wanted, equations(jaxpr)))


def holds(eqn: JaxprEqn, wanted: Callable[[JaxprEqn], bool]) -> bool:
    """Return whether an equation is wanted, or any in its bodies, at any depth."""
    return wanted(eqn) or any(contains(body, wanted) for body in bodies(eqn))


# --- the operands and results of loops and branches in their bodies


def operands_of_bodies(eqn: JaxprEqn) -> list[list[int]]:
    """Return which operand each input is, for each body of a call, a loop or a branch."""
    places = list(range(len(eqn.invars)))
    if _compat.name_of(eqn) == "while":
        first = eqn.params["cond_nconsts"]
        second = first + eqn.params["body_nconsts"]
        own = {"cond_jaxpr": places[:first], "body_jaxpr": places[first:second]}
        return [own[name] + places[second:] for name in bodies_of_while(eqn)]
    first = int(record_of(eqn).kind == "branch")  # which its first operand picks
    return [places[first:] for _ in bodies(eqn)]


def bodies_of_while(eqn: JaxprEqn) -> list[str]:
    """Return the parameters of a while loop with bodies, in the order of `bodies`."""
    return [name for name in eqn.params if name in ("cond_jaxpr", "body_jaxpr")]


def carries(eqn: JaxprEqn) -> list[tuple[int, int]]:
    """Return the places of each carry of a loop: among its operands, and among its results."""
    if _compat.name_of(eqn) == "while":
        first = eqn.params["cond_nconsts"] + eqn.params["body_nconsts"]
        return [(first + out, out) for out in range(len(eqn.outvars))]
    layout = _compat.scan_layout(eqn.params, len(eqn.invars), len(eqn.outvars))
    return list(zip(layout.carries_in, layout.carries_out, strict=True))


def fixed_in(eqn: JaxprEqn) -> range:
    """Return the operands of a loop that are the same in all its iterations."""
    if _compat.name_of(eqn) == "while":
        return range(eqn.params["cond_nconsts"] + eqn.params["body_nconsts"])
    layout = _compat.scan_layout(eqn.params, len(eqn.invars), len(eqn.outvars))
    return range(len(layout.constants))


# --- evaluation


def run(
    jaxpr: Any, args: Sequence[Any], handlers: Mapping[int, Handler], *, anew: bool = False
) -> Values:
    """Evaluate a jaxpr on `args`, with some equations handled otherwise.

    Args:
      jaxpr: with its constants, or without if it has none.
      args: one for each input variable.
      handlers: by the place of the equation in the jaxpr; the others are replayed.
      anew: whether handlers run in the context of now, instead of that of their equation.
    """
    body = open_jaxpr(jaxpr)
    if not handlers:
        return _evaluate(body, constants(jaxpr), args)
    env: dict[Var, Any] = dict(zip(body.constvars, constants(jaxpr), strict=True))
    env.update(zip(body.invars, args, strict=True))
    # The place of the last equation that reads each variable; past all for the results.
    reads = [(atom, place) for place, eqn in enumerate(body.eqns) for atom in eqn.invars]
    reads += [(atom, len(body.eqns)) for atom in body.outvars]
    last_read = {atom: place for atom, place in reads if isinstance(atom, Var)}
    start = 0
    for place in [*sorted(handlers), len(body.eqns)]:
        _replay_stretch(body.eqns[start:place], place, env, last_read)
        if place < len(body.eqns):
            eqn = body.eqns[place]
            with located(eqn, anew=anew):
                outs = handlers[place](eqn, read_all(eqn.invars, env))
            env.update(zip(eqn.outvars, outs, strict=True))
        start = place + 1
    return read_all(body.outvars, env)


def read_all(atoms: Sequence[Atom], env: Mapping[Var, Any]) -> Values:
    return [atom.val if isinstance(atom, Literal) else env[atom] for atom in atoms]


def _replay_stretch(
    eqns: Sequence[JaxprEqn], stop: int, env: dict[Var, Any], last_read: Mapping[Any, int]
) -> None:
    """Replay equations before the place `stop`, and add what is read from there on to `env`."""
    outvars = [var for eqn in eqns for var in eqn.outvars]
    made = [var for var in outvars if last_read.get(var, -1) >= stop]
    atoms = dict.fromkeys(a for eqn in eqns for a in eqn.invars if not isinstance(a, Literal))
    read = [var for var in atoms if var not in set(outvars)]
    effects = frozenset().union(*[eqn.effects for eqn in eqns])
    stretch = Jaxpr((), read, made, eqns, effects, unnamed())
    env.update(zip(made, _evaluate(stretch, (), [env[var] for var in read]), strict=True))


# From this many equations on, a stretch becomes one call of what is traced already: to bind an
# equation again takes about as long as to trace it for the first time.
_LONG = 64


def _evaluate(body: Jaxpr, consts: Sequence[Any], args: Sequence[Any]) -> Values:
    if len(body.eqns) < _LONG:
        return eval_jaxpr(body, consts, *args)
    return call_jaxpr(core.ClosedJaxpr(body, consts), args)


def replay(eqn: JaxprEqn, values: Sequence[Any]) -> Values:
    """Bind one equation to other values, of other shapes if need be."""
    invars: list[Any] = [Var(jax.typeof(value)) for value in values]
    outvars = [Var(var.aval) for var in eqn.outvars]  # what nobody reads, too
    moved = eqn.replace(invars=invars, outvars=outvars)
    single = Jaxpr((), invars, outvars, [moved], eqn.effects, unnamed())
    return eval_jaxpr(single, (), *values)


def call_jaxpr(jaxpr: core.ClosedJaxpr, values: Sequence[Any]) -> Values:
    """Evaluate a jaxpr as one call: none of its equations is traced again."""
    return replay(_compat.call_of(jaxpr), values)


def with_bodies(eqn: JaxprEqn, change: Callable[[Any], Any]) -> JaxprEqn:
    """Return the equation with each of its bodies changed, in the order of `bodies`."""

    def changed(value: Any) -> Any:
        if isinstance(value, tuple | list) and any(isinstance(part, _JAXPRS) for part in value):
            return jax.tree.map(changed, value)  # a named tuple stays one
        return change(value) if isinstance(value, _JAXPRS) else value

    return eqn.replace(params={name: changed(value) for name, value in eqn.params.items()})


def replay_with(eqn: JaxprEqn, change: Callable[[Any], Any], values: Sequence[Any]) -> Values:
    """Bind an equation with each of its bodies changed to one of the same types."""

    def changed(body: Any) -> Any:
        new = change(body)
        if isinstance(body, core.ClosedJaxpr):
            return new
        if constants(new):
            raise NotImplementedError(
                f"the body of {_compat.name_of(eqn)} ({source_line(eqn) or 'unknown line'}) "
                "captures arrays and cannot be traced again; pass them to it as arguments"
            )
        return open_jaxpr(new)

    return replay(with_bodies(eqn, changed), values)


def call_shard_map(eqn: JaxprEqn, evaluate: Callable[..., Values], values: Values) -> Values:
    """Call the shard_map of `eqn` around another body, `evaluate(*blocks)`."""
    params = eqn.params
    is_inside = AxisType.Manual in jax.sharding.get_abstract_mesh().axis_types
    mapped = jax.shard_map(
        evaluate,
        # Inside another shard_map, the mesh of the context says which axes are manual already.
        mesh=None if is_inside else params["mesh"],
        in_specs=tuple(params["in_specs"]),
        out_specs=list(params["out_specs"]),
        axis_names=set(eqn.params["newly_manual_axes"]),
        check_vma=params["check_vma"],
    )
    return mapped(*values)


@contextlib.contextmanager
def located(eqn: JaxprEqn, *, anew: bool = False) -> Iterator[None]:
    """Give what is traced here the source line and the name stack of `eqn`, and its context."""
    info = eqn.source_info
    names = source_info_util.current_name_stack() + info.name_stack
    context = contextlib.nullcontext() if anew else eqn.ctx.manager
    with source_info_util.user_context(info.traceback, name_stack=names), context:
        yield


def context_here() -> Any:
    """Return the context that JAX gives to an equation that is traced now."""
    return jax.make_jaxpr(jax.lax.neg)(1.0).eqns[0].ctx


def source_line(eqn: JaxprEqn) -> str:
    """Return where the user's code makes this equation: "train.py:12", or "" if unknown."""
    frame = source_info_util.summarize(eqn.source_info)
    return _user_line(frame, os.getcwd())


@functools.lru_cache(maxsize=1024)
def _user_line(summary: str, _directory: str) -> str:
    match = _SUMMARY.match(summary)
    return "" if match is None else f"{display_path(match['file'])}:{match['line']}"


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


@functools.cache
def unnamed() -> Any:
    """Return the debug info of a jaxpr without a function; its class is not public."""
    made: Any = jax.make_jaxpr(lambda: ())().jaxpr.debug_info
    return made._replace(
        traced_for="rewriting", func_src_info="jax_dist", arg_names=None, result_paths=None
    )


def as_typed(value: Any, atom: Any) -> Any:
    """Return the value typed as `atom`, which may be varying where the value is not."""
    missing = _compat.varying_axes(atom.aval) - _compat.varying_axes(jax.typeof(value))
    axes = tuple(sorted(missing, key=str))
    return jax.lax.pcast(value, axes, to="varying") if missing else value


# --- equations at any depth of a jaxpr


@dataclasses.dataclass(frozen=True, slots=True)
class EquationPlace:
    """One equation, and what stands around it."""

    eqn: JaxprEqn
    within: Jaxpr  # which has it among its equations
    around: tuple[JaxprEqn, ...] = ()  # outermost first

    @property
    def line(self) -> str:
        """The user's; those inside a jit know only lines inside it."""
        lines = map(source_line, (self.eqn, *reversed(self.around)))
        return next(filter(None, lines), "")


def places(
    jaxpr: Any, wanted: Callable[[JaxprEqn], bool], around: tuple[JaxprEqn, ...] = ()
) -> Iterator[EquationPlace]:
    """Yield the wanted equations in program order; the bodies of a wanted one are not searched."""
    within = open_jaxpr(jaxpr)
    for eqn in within.eqns:
        if wanted(eqn):
            yield EquationPlace(eqn, within, around)
        else:
            for body in bodies(eqn):
                yield from places(body, wanted, (*around, eqn))


def run_at(
    jaxpr: Any, args: Sequence[Any], handler_of: Callable[[JaxprEqn], Handler | None]
) -> Values:
    """Evaluate a jaxpr as `run` does, with the equations at any depth that have a handler."""

    def run_bodies(eqn: JaxprEqn, values: Values) -> Values:
        if _compat.name_of(eqn) == "shard_map":
            body = eqn.params["jaxpr"]
            return call_shard_map(eqn, lambda *blocks: run_at(body, blocks, handler_of), values)

        def changed(body: Any) -> Any:
            if not contains(body, has_handler):
                return body
            # Traced where the body will stand: inside the shard_map around it, whose axes it uses.
            evaluate = lambda *args: run_at(body, args, handler_of)
            return jax.make_jaxpr(evaluate)(*open_jaxpr(body).in_avals)

        return replay_with(eqn, changed, values)

    has_handler = lambda eqn: handler_of(eqn) is not None
    handlers: dict[int, Handler] = {}
    for number, eqn in enumerate(open_jaxpr(jaxpr).eqns):
        if handler := handler_of(eqn):
            handlers[number] = handler
        elif holds(eqn, has_handler):
            handlers[number] = run_bodies
    return run(jaxpr, args, handlers)
