"""Captured arrays of a traced function: their names, warnings of them, and how they are lifted.

To lift a captured array is to make it an input of the program. A traced program owns the values
that it was traced with, as under jit: NumPy arrays are copied at once, because their owner may
write to them, and identified by content; jax arrays are identified as objects.
"""

import contextlib
import contextvars
import dataclasses
import functools
import hashlib
import types
import typing
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from dataclasses import field
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr

from jax_dist._calls import LIBRARIES, definition, warn_user
from jax_dist._passes import constants
from jax_dist._passes.constants import Capture, Identity, array_identity
from jax_dist.errors import ArgumentError, CapturedArrayWarning

Captures: TypeAlias = typing.Literal["lift", "warn", "allow", "error"]


def find_captures(jaxpr: ClosedJaxpr, fun: Callable) -> tuple[Capture, ...]:
    """Return each array in a program, at any depth, in order, with its name in the user's `fun`."""
    captures = constants.CaptureFinder().find(jaxpr)
    for identity, (name, line) in find_names(fun, captures).items():
        captures[identity].name, captures[identity].captured_at = name, line
    return tuple(captures.values())


# Names are searched in what a function closes over, the globals that its code names, the objects
# that its methods belong to, and all functions that it reaches in these. A name starts again at
# each function, because the user sees it there.
_MAX_FUNCTIONS = 1_000  # a search ends here; what was not found by then has no name
_MAX_DEPTH = 2  # of objects in objects; containers do not count


def find_names(fun: Callable, arrays: Collection[Identity]) -> dict[Identity, tuple[str, str]]:
    """Return the user's names of arrays, and the lines where the functions begin that capture them.

    By array, as in `{array: ("params['w']", "train.py:10")}`. Searched are `fun`, any callable, and
    the functions that it reaches; arrays that none of them reaches are not in the result.
    """
    names: dict[Identity, tuple[str, str]] = {}
    queue = [fun]  # breadth-first: callables are appended while the loop runs
    seen = {id(fun): fun}  # with the objects, so that no other gets their address
    for function in queue:
        for variable_name, variable in _list_variables(function):
            for name, leaf in _list_leaves(variable, variable_name, _MAX_DEPTH):
                if callable(leaf) and id(leaf) not in seen and len(seen) < _MAX_FUNCTIONS:
                    seen[id(leaf)] = leaf
                    queue.append(leaf)
                if not name or not isinstance(leaf, jax.Array | np.ndarray):
                    continue  # the user has no name for it, or it is no array
                identity = array_identity(leaf)
                if identity in arrays:
                    names.setdefault(identity, (name, definition(function)))  # with its line
        if len(names) == len(arrays):
            break
    return names


def _list_variables(fun: Any) -> Iterator[tuple[str, Any]]:
    """Yield the variables that a callable can reach, as (name, value).

    The name is "" for a callable that is only passed through, such as `__wrapped__`: the search
    goes on inside it, and names start again there.
    """
    if isinstance(fun, types.MethodType):
        yield "self", fun.__self__
        yield "", fun.__func__
    elif isinstance(fun, functools.partial):
        yield from ((f"args[{number}]", value) for number, value in enumerate(fun.args))
        yield from fun.keywords.items()
        yield "", fun.func
    elif isinstance(fun, types.FunctionType):
        yield "", vars(fun).get("__wrapped__")
        code = fun.__code__
        # The names in the code of a library mean nothing to the user.
        is_library = code.co_filename.startswith(LIBRARIES)
        for name, cell in zip(code.co_freevars, fun.__closure__ or (), strict=True):
            with contextlib.suppress(ValueError):  # not assigned yet
                yield "" if is_library else name, cell.cell_contents
        for name in sorted(_names_in(code) & fun.__globals__.keys()) if not is_library else ():
            yield name, fun.__globals__[name]
    else:  # an object that is called; a jit, custom_jvp or custom_vjp has functions as attributes
        yield "self", fun
        methods = vars(type(fun)).values()
        yield from (("", method) for method in methods if isinstance(method, types.FunctionType))


def _names_in(code: types.CodeType) -> frozenset[str]:
    """Return the globals that some code names, also in the functions defined in it."""
    inner = [_names_in(const) for const in code.co_consts if isinstance(const, types.CodeType)]
    return frozenset(code.co_names).union(*inner)


def _list_leaves(value: Any, name: str, depth: int) -> Iterator[tuple[str, Any]]:
    """Yield (path, leaf) of a pytree, and of attributes of its leaves down to `depth` objects."""
    try:
        leaves = jax.tree_util.tree_leaves_with_path(value)
    except Exception:  # noqa: BLE001  # of a node that cannot be flattened, as keys without order
        return
    for keys, leaf in leaves:
        leaf_name = name and name + jax.tree_util.keystr(keys)
        yield leaf_name, leaf
        if depth == 0 or isinstance(leaf, jax.Array | types.FunctionType | types.ModuleType):
            continue
        attributes = getattr(leaf, "__dict__", {})
        for key in sorted(attributes, key=lambda key: key.startswith("_")):  # public ones first
            path = leaf_name and f"{leaf_name}.{key}"
            yield from _list_leaves(attributes[key], path, depth - 1)


def warning_text(captures: Sequence[Capture], fun_name: str, *, kept_because: str = "") -> str:
    """Return one text for all captures of a call; `kept_because` says why they stay."""
    count = "an array" if len(captures) == 1 else f"{len(captures)} arrays"
    advice = "They are arguments of the program now; to avoid this warning, pass them yourself."
    if kept_because:
        advice = (
            f"They stay in the program, because {kept_because}: it compiles slowly, and again for "
            "other values. Pass them as arguments."
        )
    return f"JXD401: '{fun_name}' captures {count}: {'; '.join(map(str, captures))}. {advice}"


_is_lifting = contextvars.ContextVar("lifts", default=False)


@contextlib.contextmanager
def tracing(captures: Captures) -> Iterator[None]:
    """Record for `is_lifted_outside`, while a program is traced inside, whether it lifts captures.

    To lift them is to make the arrays that the function captures inputs of the program. That covers
    what a pmap or rewrite captures that is traced as a part of it, so that one need not warn.
    """
    token = _is_lifting.set(captures == "lift")
    try:
        yield
    finally:
        _is_lifting.reset(token)


def is_lifted_outside() -> bool:
    """Return whether what is traced now is part of a program that lifts what it captures."""
    return _is_lifting.get()


@dataclasses.dataclass(frozen=True, slots=True, weakref_slot=True)
class Lifted:
    """A program whose first inputs are arrays that it captured."""

    jaxpr: ClosedJaxpr = field(compare=False)
    all_captures: tuple[Capture, ...] = field(compare=False)  # lifted or not; () if not looked for
    captures: tuple[Capture, ...] = field(compare=False)  # those that are inputs now
    values: tuple[Any, ...] = field(compare=False)  # NumPy arrays as copies, keys as their data
    key: Hashable  # equal for equal values: such programs share copies of these on devices


def lift(jaxpr: ClosedJaxpr, fun: Callable, name: str, policy: Captures) -> Lifted:
    """Make the large captured arrays and random keys inputs of the program, or warn of them.

    `fun` is the user's, and `name` its name in messages. The policy "error" raises ArgumentError.
    """
    all_captures = () if policy == "allow" else find_captures(jaxpr, fun)
    worth_lifting = [capture for capture in all_captures if capture.is_worth_lifting]
    kept = [capture for capture in worth_lifting if policy != "lift" or capture.refused]
    lifted = tuple(capture for capture in worth_lifting if capture not in kept)
    if kept:
        why = "they cannot be handed on" if policy == "lift" else f"captures='{policy}' is set"
        text = warning_text(kept, name, kept_because=why)
        if policy == "error":
            raise ArgumentError(text)
        warn_user(text, CapturedArrayWarning)
    jaxpr, data = constants.lift_arrays(jaxpr, [capture.value for capture in lifted])
    for capture in lifted:
        capture.action = "lifted"
    for capture in all_captures:
        capture.value = None  # what is not lifted need not live longer
    # The owner of a NumPy array may write to it.
    values = tuple(np.array(x) if isinstance(x, np.ndarray) else x for x in data)
    return Lifted(jaxpr, all_captures, lifted, values, tuple(map(_placement_key, values)))


def _placement_key(value: Any) -> Hashable:
    """Return a hash of a NumPy array's content, as its owner may write to it; of others the id."""
    if isinstance(value, jax.Array):
        return id(value)
    content = np.ascontiguousarray(value)
    digest = hashlib.blake2b(content.view(np.uint8).data).digest()
    return digest, content.shape, content.dtype.name  # `str` of all ml_dtypes is alike


class Watch:
    """Warnings of the captures of one function; each capture is reported once."""

    def __init__(self, fun_name: str):
        self._fun_name = fun_name
        self._warned: set[tuple] = set()

    def warn_of(self, captures: Sequence[Capture], *, lifted: bool) -> None:
        """Warn of the large captures that no earlier call reported in this state, lifted or not."""
        large = [((c.name, c.used_at, lifted), c) for c in captures if c.is_large]
        new = [capture for key, capture in large if key not in self._warned]
        self._warned.update(key for key, _ in large)
        if new:
            why = "this call is traced by a jit or a scan around it (put rewrite outside of that)"
            text = warning_text(new, self._fun_name, kept_because="" if lifted else why)
            warn_user(text, CapturedArrayWarning)
