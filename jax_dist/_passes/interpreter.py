"""Reading jaxprs, evaluating them, and changing some of their equations.

A changed program is built from the equations of the old one, at any depth. An untouched equation
keeps its context, source line, name stack and effects; a changed body keeps its types, so nothing
needs to be known of the primitive around it; and only what is new is traced.
"""

import contextlib
import functools
import operator
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
from jax.core import ShapedArray
from jax.extend import core, source_info_util
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var
from jax.sharding import AxisType

from jax_dist import _compat, primitives
from jax_dist._calls import OURS
from jax_dist.errors import display_path

Atom: TypeAlias = Any  # Var | Literal, of which pyright says "partially unknown"
Values: TypeAlias = list[Any]  # of the atoms of an equation, in order
Handler: TypeAlias = Callable[[JaxprEqn, Values], Values]

_JAXPRS, _SEQUENCES = frozenset({Jaxpr, core.ClosedJaxpr}), (tuple, list)


def open_jaxpr(jaxpr: Any) -> Jaxpr:
    """Return the jaxpr without its constants, whether it came with them or not."""
    return getattr(jaxpr, "jaxpr", jaxpr)


def constants(jaxpr: Any) -> Sequence[Any]:
    """Return the constants of a jaxpr; none for an open one."""
    return getattr(jaxpr, "consts", ())


def bodies(eqn: JaxprEqn) -> list[Any]:
    """Return the jaxprs in the parameters of an equation, in order: of a while, condition, body."""
    jaxprs = []
    for value in eqn.params.values():
        if type(value) in _JAXPRS:
            jaxprs.append(value)
        elif isinstance(value, _SEQUENCES):
            jaxprs += [part for part in value if type(part) in _JAXPRS]
    if len(jaxprs) == 2 and _compat.name_of(eqn) == "while":
        return [eqn.params["cond_jaxpr"], eqn.params["body_jaxpr"]]
    return jaxprs


def names_of(part: Any) -> tuple[Any, ...]:
    """Return the axes in an entry of a spec or a parameter of a collective: None, name or tuple."""
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


def holds(eqn: JaxprEqn, wanted: Callable[[JaxprEqn], bool]) -> bool:
    """Return whether an equation is wanted, or any in its bodies, at any depth."""
    return wanted(eqn) or any(wanted(inner) for body in bodies(eqn) for inner in equations(body))


def record_of(eqn: JaxprEqn) -> primitives.Primitive:
    """Return the record of an equation's primitive; an opaque one if a user has defined it."""
    return primitives.record(_compat.name_of(eqn))


def operands_of_bodies(eqn: JaxprEqn) -> list[list[int]]:
    """Return for each body of a call, loop or branch the operand number of each of its inputs.

    Of `cond index a b` with two branches that is `[[1, 2], [1, 2]]`. Of a while loop with a
    constant for its condition, one for its body, and a carry: `[[0, 2], [1, 2]]`.
    """
    numbers = list(range(len(eqn.invars)))
    if _compat.name_of(eqn) == "while":
        for_condition, first_carry = eqn.params["cond_nconsts"], loop_counts(eqn).constants
        return [numbers[:for_condition] + numbers[first_carry:], numbers[for_condition:]]
    first_input = 1 if record_of(eqn).kind == "branch" else 0  # operand 0 of a branch is its index
    return [numbers[first_input:] for _ in bodies(eqn)]


class LoopCounts(NamedTuple):
    """Numbers of a loop's operands: constants come first, then carries, then the xs of a scan."""

    constants: int
    carries: int  # also of its results, which begin with these

    @property
    def first_x(self) -> int:
        return self.constants + self.carries


def loop_counts(eqn: JaxprEqn) -> LoopCounts:
    """Return how many operands of a scan or while loop are constants, and how many carries."""
    if _compat.name_of(eqn) == "while":
        constants = eqn.params["cond_nconsts"] + eqn.params["body_nconsts"]
        return LoopCounts(constants, len(eqn.outvars))
    return LoopCounts(*_compat.scan_counts(eqn.params))


def evaluate(jaxpr: Any, args: Sequence[Any]) -> Values:
    """Evaluate a jaxpr, with its constants or without if it has none, in the current trace."""
    # As one call of what is traced already: to bind each equation again takes about as long as to
    # trace it for the first time.
    is_closed = isinstance(jaxpr, core.ClosedJaxpr)
    return replay(_compat.call_of(jaxpr if is_closed else core.ClosedJaxpr(jaxpr, ())), args)


def run(
    jaxpr: Any, args: Sequence[Any], handler_of: Callable[[JaxprEqn], Handler | None]
) -> Values:
    """Evaluate a jaxpr on `args` equation by equation, in the context of now; return its results.

    `handler_of` returns the function that evaluates an equation, or None to bind it as it is.
    """
    body = open_jaxpr(jaxpr)
    inputs = [*body.constvars, *body.invars]
    env: dict[Var, Any] = dict(zip(inputs, [*constants(jaxpr), *args], strict=True))
    for eqn in body.eqns:
        handler, values = handler_of(eqn), read_all(eqn.invars, env)
        if handler is None:
            outs = replay(eqn, values)
        else:
            with use_location(eqn, anew=True):
                outs = handler(eqn, values)
        env.update(zip(eqn.outvars, outs, strict=True))
    return read_all(body.outvars, env)


def read_all(atoms: Sequence[Atom], env: Mapping[Var, Any]) -> Values:
    return [atom.val if isinstance(atom, Literal) else env[atom] for atom in atoms]


def replay(eqn: JaxprEqn, values: Sequence[Any]) -> Values:
    """Bind one equation to other values, of other shapes if need be; return its results."""
    params = eqn.primitive.get_bind_params(eqn.params)  # as `jax.core.eval_jaxpr` does
    with use_location(eqn):
        results = eqn.primitive.bind(*values, **params)
    return list(results) if eqn.primitive.multiple_results else [results]


def with_bodies(eqn: JaxprEqn, change: Callable[[Any], Any]) -> JaxprEqn:
    """Return the equation with `change` applied to each jaxpr in its parameters, see `bodies`.

    It is `eqn` itself if `change` returns each as it was.
    """
    if not bodies(eqn):
        return eqn

    def change_param(value: Any) -> Any:
        if type(value) in _JAXPRS:
            return change(value)
        if not isinstance(value, _SEQUENCES) or all(type(v) not in _JAXPRS for v in value):
            return value
        new = jax.tree.map(change_param, value)  # a named tuple stays one
        is_same = all(map(operator.is_, jax.tree.leaves(new), jax.tree.leaves(value)))
        return value if is_same else new

    params = {name: change_param(value) for name, value in eqn.params.items()}
    is_same = all(params[name] is value for name, value in eqn.params.items())
    return eqn if is_same else eqn.replace(params=params)


@contextlib.contextmanager
def use_location(eqn: JaxprEqn, *, anew: bool = False) -> Iterator[None]:
    """Give what is traced inside the line, name stack and, unless `anew`, the context of `eqn`."""
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
    return _user_line(source_info_util.summarize(eqn.source_info), os.getcwd())


@functools.lru_cache(maxsize=1024)
def _user_line(summary: str, _directory: str) -> str:
    match = _SUMMARY.match(summary)
    return "" if match is None else f"{display_path(match['file'])}:{match['line']}"


_SUMMARY = re.compile(r"(?P<file>.+?):(?P<line>\d+)(:\d+)? \(")  # "train.py:12:4 (step)"
# Lines of our own are not the user's, neither in reports nor in the programs that we emit.
source_info_util.register_exclusion(OURS)
# And `jax.debug.breakpoint` passes the variables of all frames but these into the program.
_compat.hide_frames(OURS)


def user_line_of(eqn: JaxprEqn, around: Sequence[JaxprEqn]) -> str:
    """Return the user's line of an equation, or else of the innermost `around` that has one."""
    return next(filter(None, map(source_line, (eqn, *reversed(around)))), "")


class Builder:
    """A jaxpr that is being built from the equations of other ones.

    It has the inputs and constants of `source`, and is open or closed as that.
    """

    def __init__(self, source: Any) -> None:
        self.source = source
        self.eqns: list[JaxprEqn] = []
        # What variables of the others became here, if another atom; or a `DeferredGather`.
        self.env: dict[Any, Any] = {}
        self.is_changed = False  # whether the result differs from `source`

    def read_all(self, atoms: Sequence[Atom]) -> list[Any]:
        """Return what each atom became."""
        env = self.env
        return [atom if isinstance(atom, Literal) else env.get(atom, atom) for atom in atoms]

    def copy(self, eqn: JaxprEqn, invars: Sequence[Any], **fields: Any) -> None:
        """Add an equation with the operands `invars`, new result variables, and changed fields."""
        # New ones, because a jit may be inlined twice, and operands may be on another mesh now.
        outvars = [Var(_drop_mesh(var.aval)) for var in eqn.outvars]
        self.env.update(zip(eqn.outvars, outvars, strict=True))
        self.eqns.append(eqn.replace(invars=list(invars), outvars=outvars, **fields))

    def enter(self, jaxpr: Any, atoms: Sequence[Any]) -> Jaxpr:
        """Let the inputs of a jaxpr be `atoms` here; return it open, for its equations to be added.

        Its constants become literals, as a body has no constants of its own.
        """
        opened = open_jaxpr(jaxpr)
        self.env.update(zip(opened.invars, atoms, strict=True))
        for var, constant in zip(opened.constvars, constants(jaxpr), strict=True):
            self.env[var] = Literal(constant, var.aval)
        return opened

    def add(self, jaxpr: Any, atoms: Sequence[Atom], **fields: Any) -> list[Atom]:
        """Add the equations of a jaxpr that is called with `atoms`; return its results."""
        opened = self.enter(jaxpr, atoms)
        for eqn in opened.eqns:
            self.copy(eqn, self.read_all(eqn.invars), **fields)
        return self.read_all(opened.outvars)

    def add_changed(self, eqns: Sequence[JaxprEqn], change: "Change") -> None:
        """Add equations, and at any depth what `change` adds in place of those it replaces."""
        for eqn in eqns:
            results = change(eqn, self)
            if results is not None:
                self.is_changed = True
                self.env.update(zip(eqn.outvars, results, strict=True))
                continue
            new = with_bodies(eqn, lambda body: rebuild(body, change))
            self.is_changed |= new is not eqn
            self.copy(new, self.read_all(new.invars))

    def finish(self, outvars: Sequence[Atom]) -> Any:
        """Return the jaxpr."""
        new = open_jaxpr(self.source).replace(eqns=self.eqns, outvars=outvars)
        is_closed = isinstance(self.source, core.ClosedJaxpr)
        return core.ClosedJaxpr(new, self.source.consts) if is_closed else new


# Adds the replacement of an equation to a builder, and returns its results; None: no replacement.
Change: TypeAlias = Callable[[JaxprEqn, Builder], Sequence[Atom] | None]


def _drop_mesh(aval: Any) -> Any:
    """Return a type without its mesh of Auto axes, as the new operands may be on another one."""
    is_auto = isinstance(aval, ShapedArray) and {*aval.sharding.mesh.axis_types} == {AxisType.Auto}
    return aval.update(sharding=None) if is_auto else aval


def rebuild(jaxpr: Any, change: Change) -> Any:
    """Return a jaxpr, open or closed as it came, with some equations changed; itself if none is."""
    opened, builder = open_jaxpr(jaxpr), Builder(jaxpr)
    builder.add_changed(opened.eqns, change)
    return builder.finish(builder.read_all(opened.outvars)) if builder.is_changed else jaxpr


def inline_calls(jaxpr: Any, is_inlined: Callable[[JaxprEqn], bool]) -> Any:
    """Return a jaxpr with the wanted calls, at any depth, replaced by their equations."""

    def inline(eqn: JaxprEqn, builder: Builder) -> Sequence[Atom] | None:
        if not is_inlined(eqn):
            return None
        (called,) = bodies(eqn)
        opened = builder.enter(called, builder.read_all(eqn.invars))
        builder.add_changed(opened.eqns, inline)
        return builder.read_all(opened.outvars)

    return rebuild(jaxpr, inline)


def replace_equations(jaxpr: Any, handlers: Mapping[int, Handler]) -> Any:
    """Return a jaxpr with equations replaced by a trace of their handler, by the `id` of each."""

    def change(eqn: JaxprEqn, builder: Builder) -> Sequence[Atom] | None:
        if (handler := handlers.get(id(eqn))) is None:
            return None
        atoms = builder.read_all(eqn.invars)
        with use_location(eqn):
            # A function of its own each time, for JAX remembers what it has traced.
            trace = jax.make_jaxpr(lambda *values: handler(eqn, list(values)))
            return builder.add(trace(*[atom.aval for atom in atoms]), atoms)

    return rebuild(jaxpr, change)
