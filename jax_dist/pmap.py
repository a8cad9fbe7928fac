"""The decorator that replaces `jax.pmap`, and the object that it returns.

There is one dispatcher for each function and set of options, kept as long as the function lives, so
`pmap(f)(x)` in a loop traces once. A function is known by identity, as to JAX: two that are equal,
such as two partial objects, may read attributes and globals that have changed in between. A bound
method, which is another object at each access, is known by its function and its object where it is
to `jax.pmap`. All are held weakly, for a dispatcher must not keep its own key alive.
"""

import functools
import sys
import types
import weakref
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import (
    TYPE_CHECKING,
    Any,
    Concatenate,
    Generic,
    Literal,
    NamedTuple,
    ParamSpec,
    Protocol,
    TypedDict,
    TypeVar,
    Unpack,
    get_args,
    overload,
)

import jax

from jax_dist import _compat
from jax_dist._compat.private import Device
from jax_dist._pmap import axes
from jax_dist._pmap.axes import AxisPrefix
from jax_dist._pmap.body import Options
from jax_dist._pmap.dispatch import Dispatcher
from jax_dist._pmap.meshes import UNNAMED, DeviceChoice
from jax_dist._rewrite.captures import Captures
from jax_dist._rewrite.gathers import Gathers
from jax_dist._rewrite.variable_names import definition
from jax_dist._usage import nearest
from jax_dist.errors import ArgumentTypeError, DeviceCountError, refusal

_Arrays = Literal["local", "global"]
_P = ParamSpec("_P")
_Q = ParamSpec("_Q")
_R = TypeVar("_R")
_OURS = ("virtual", "captures", "gathers", "arrays")  # the options that jax.pmap has not
_CHOICES = {  # what each may be, and what it is for
    "captures": (Captures, "it says what becomes of arrays that the function takes from around it"),
    "gathers": (Gathers, "it says what becomes of an all_gather that is only reduced"),
    "arrays": (_Arrays, "it says whether results show the slices of one process or of all"),
}
_known: dict[Hashable, "_Known"] = {}


class _Decorator(Protocol):
    """What `pmap` gives where it is called without a function."""

    def __call__(self, fun: Callable[_P, _R], /) -> "Mapped[_P, _R]": ...


class _PmapOptions(TypedDict, total=False):
    """The keyword arguments of `pmap`, to type checkers."""

    in_axes: AxisPrefix
    out_axes: AxisPrefix
    static_broadcasted_argnums: int | Iterable[int]
    devices: Sequence[Device] | None
    backend: str | None
    axis_size: int | None
    donate_argnums: int | Iterable[int]
    virtual: bool
    captures: Captures
    gathers: Gathers
    arrays: _Arrays


@overload
def pmap(
    fun: Callable[_P, _R], axis_name: Hashable | None = None, **options: Unpack[_PmapOptions]
) -> "Mapped[_P, _R]": ...
@overload
def pmap(*, axis_name: Hashable | None = None, **options: Unpack[_PmapOptions]) -> _Decorator: ...
def pmap(
    fun: Callable[..., Any] | None = None,
    axis_name: Hashable | None = None,
    *,
    in_axes: AxisPrefix = 0,
    out_axes: AxisPrefix = 0,
    static_broadcasted_argnums: int | Iterable[int] = (),
    devices: Sequence[Device] | None = None,
    backend: str | None = None,
    axis_size: int | None = None,
    donate_argnums: int | Iterable[int] = (),
    virtual: bool = False,
    captures: Captures = "lift",
    gathers: Gathers = "reduce",
    arrays: _Arrays = "local",
    **unknown: Any,
) -> Any:
    """Maps a function over devices by `jit(shard_map)`, one slice of each argument on each device.

    Takes the arguments of `jax.pmap`, with the same meaning and the same numbers. It also works
    where `jax.pmap` fails: inside jit, scan and grad with several processes, nested, under another
    mesh set with `jax.set_mesh`, and with arrays on other devices. In the steady state, a call is
    one C++ dispatch.

    Args:
      fun: the function of one slice. It may use collectives over `axis_name`. Without it, `pmap`
        returns a decorator.
      axis_name: names the mapped axis for collectives.
      in_axes: which dimension of each positional argument is mapped: an integer, None for values
        that all devices share, or a tree of these that is a prefix of the arguments. A negative
        integer counts from the end. Arguments passed by keyword are mapped over their leading
        dimension.
      out_axes: where the mapped dimension goes in each result; None returns the value of the first
        device, and promises that all devices have the same value.
      static_broadcasted_argnums: positions of arguments that are compile-time constants; these must
        be hashable.
      devices: the devices to use, one slice on each, in this order; the same in every process.
      backend: "cpu", "gpu" or "tpu"; the platform whose devices to use if `devices` is not given.
      axis_size: the size of the mapped axis over all processes; it is only checked.
      donate_argnums: positions of arguments whose memory the results may take over; give the state
        of a training loop.
      virtual: allows an axis that is a multiple of the number of devices, with several slices on
        each and collectives over all of them, to try a program for 64 devices on a laptop.
      captures: what to do with arrays of 1 kB or more that `fun` captures: "lift" them
        to arguments, placed on the devices once, with a warning; "warn" only; "allow" them; or
        raise an "error". As under jit, they keep the values that they have when `fun` is traced.
      gathers: "reduce" a `lax.all_gather` that is only reduced to one reduction, equal up to the
        order of summation; only where the result is "exact", to the bit; or "keep" it.
      arrays: with several processes, "local" shows each process its own slices, as `jax.pmap` does;
        "global" leaves results whole, which is faster when they are the next call's arguments.

    Returns:
      The mapped function. It has `lower` and `trace`, as jit objects do; `jitted`, the bare jit
      call, which moves no arguments; and `__wrapped__`, which is `fun`.

    Raises:
      TypeError: `fun` cannot be called, or in_axes or out_axes hold something else than integers.
      ValueError: `devices` is empty, or `captures`, `gathers` or `arrays` has an unknown value.
        When called: the sizes of the arguments differ, none is mapped, in_axes or out_axes does not
        fit, the axis does not fit the devices, or a static argument cannot be hashed.

    >>> import functools, jax, jax.numpy as jnp
    >>> @functools.partial(pmap, axis_name="i")
    ... def share(x):
    ...     return x / jax.lax.psum(x, "i")
    >>> share(jnp.arange(4.0)).tolist()
    [0.0, 0.1666666716337204, 0.3333333432674408, 0.5]

    See JEP 14273 on shard_map, and jax-ml/jax#2926 on why pmap in jit needed it.
    """
    asked = dict(locals())  # the options, by name
    del asked["fun"], asked["unknown"]
    if unknown:
        raise _unknown_option(next(iter(unknown)), asked)
    if fun is None:
        return functools.partial(pmap, **asked)
    devices = asked["devices"] = _devices(devices)
    if (fake := _stand_in()) is not None:
        return fake(fun, **{name: asked[name] for name in asked if name not in _OURS})
    # As they are now: containers may be changed later, and what is refused may equal what is known.
    for name in ("in_axes", "out_axes"):
        if type(asked[name]) is not int:
            axes.check_axes(name, asked[name])
            asked[name] = axes.kept(asked[name])
    for name in ("static_broadcasted_argnums", "donate_argnums"):
        asked[name] = axes.argument_numbers(name, asked[name])
    dispatcher = _dispatcher_of(fun, tuple(asked.values()))
    if dispatcher is None:
        axes.check_function(fun)
        if devices is not None and not devices:
            raise refusal(
                DeviceCountError,
                what="'devices' argument to pmap must be non-empty, or None.",
                which=["len(devices) is 0"],
                why="each slice runs on one of them",
                do="Give at least one device, or leave devices out to use all.",
            )
        axes.check_name(axis_name)
        for name, (kind, why) in _CHOICES.items():
            if asked[name] not in (choices := get_args(kind)):
                raise refusal(
                    ValueError,
                    what=f"pmap {name} must be {' or '.join(map(repr, choices))}",
                    which=[f"{name}={asked[name]!r}"],
                    why=why,
                    do=f"Leave it out for {choices[0]!r}.",
                )
        options = Options(
            axis_name=axis_name,
            in_axes=asked["in_axes"],
            out_axes=asked["out_axes"],
            static=asked["static_broadcasted_argnums"],
            donated=asked["donate_argnums"],
            choice=DeviceChoice(
                fun_name=axes.function_name(fun),
                axis_name=axis_name if isinstance(axis_name, str) else UNNAMED,
                devices=devices,
                backend=backend,
                axis_size=axis_size,
                virtual=virtual,
            ),
            arrays=arrays,
            captures=captures,
            gathers=gathers,
        )
        dispatcher = _new_dispatcher(
            fun, tuple(asked.values()), lambda living: Dispatcher(options, living)
        )
    return Mapped(fun, dispatcher, functools.partial(pmap, **asked))


def _unknown_option(name: str, known: Iterable[str]) -> TypeError:
    first, _, _ = name.partition("_")
    alike = [each for each in known if each.startswith(first) or name in each]
    near = next(iter(alike), None) or nearest(name, known)
    return refusal(
        TypeError,
        what=f"pmap() got an unexpected keyword argument {name!r}",
        which=[f"it takes {', '.join(known)}"],
        why="the arguments of the function itself are given when it is called",
        do=f"Did you mean {near}? If not, leave it out." if near else "Leave it out.",
    )


def _devices(devices: Any) -> tuple[Device, ...] | None:
    if devices is None:
        return None
    if isinstance(devices, Iterable):
        devices = tuple(devices)
        if all(isinstance(device, jax.Device) for device in devices):
            return devices
    do = "Give a list, as in devices=jax.devices(), or leave it out to use all."
    if isinstance(devices, int):
        do = f"For the first {devices}, give devices=jax.devices()[:{devices}]."
    raise refusal(
        ArgumentTypeError,
        what="'devices' argument to pmap must be a sequence of devices, or None",
        which=[f"devices={devices!r}, of type {type(devices).__name__}"],
        why="slice k of the mapped axis runs on device k of it",
        do=do,
    )


def _stand_in() -> Callable | None:
    """`jax.pmap` as `chex.fake_pmap` has replaced it for now; None where it is jax's own.

    Who asks for a pmap that maps nothing, to step through a program, means ours too.
    """
    replaced: Any = jax.pmap
    while isinstance(replaced, functools.partial):
        replaced = replaced.func
    home = getattr(replaced, "__globals__", {}).get("__name__", "")
    return jax.pmap if home.partition(".")[0] == "chex" else None


class _Known(NamedTuple):
    """The dispatchers of one function."""

    parts: list[weakref.ref]  # what the function consists of; when one dies, so does this
    by_options: dict[Hashable, Dispatcher]

    def is_alive(self) -> bool:
        return all(part() is not None for part in self.parts)


def _dispatcher_of(fun: Callable, asked: tuple[Any, ...]) -> Dispatcher | None:
    """The dispatcher for a function with these options, if there is one."""
    known = _known.get(_key(fun))
    if known is None or not known.is_alive():
        return None
    try:
        return known.by_options.get(asked)
    except TypeError:  # a dict or list among the axes
        return known.by_options.get(_hashable(asked))


def _new_dispatcher(
    fun: Callable, asked: tuple[Any, ...], make: Callable[[Callable[[], Callable]], Dispatcher]
) -> Dispatcher:
    """A new dispatcher; remembered, unless the function cannot be held weakly.

    `make` makes it, and is told how to get the function while that lives.
    """
    key = _key(fun)
    everything = _known  # also when the globals of this module are gone, as Python ends

    def forget(part: weakref.ref) -> None:
        known = everything.get(key)
        if known is not None and part in known.parts:  # not what has the same address since
            del everything[key]

    known = _known.get(key)
    if known is None or not known.is_alive():
        try:
            known = _Known([weakref.ref(part, forget) for part in _parts(fun)], {})
        except TypeError:
            return make(lambda: fun)
        _known[key] = known
    references = known.parts
    dispatcher = make(lambda: _joined([reference() for reference in references]))
    try:
        known.by_options[asked] = dispatcher
    except TypeError:
        known.by_options[_hashable(asked)] = dispatcher
    return dispatcher


def _key(fun: Callable) -> Hashable:
    return tuple(map(id, _parts(fun)))


def _parts(fun: Callable) -> list[Any]:
    """What lives on between two accesses of a function: a bound method does not."""
    if isinstance(fun, types.MethodType) and _compat.PMAP_KNOWS_METHODS:
        return [fun.__func__, fun.__self__]
    return [fun]


def _joined(parts: list[Any]) -> Callable:
    return parts[0] if len(parts) == 1 else types.MethodType(*parts)


def _hashable(asked: tuple[Any, ...]) -> tuple:
    """The same request with its containers flattened."""
    leaves, structure = jax.tree.flatten(asked, is_leaf=lambda node: node is None)
    return (*leaves, structure)


class _DocOfFunction:
    """That of the class, asked on the class; that of the function, asked on an object."""

    def __init__(self, of_class: str):
        self._of_class = of_class

    def __get__(self, mapped: Any, owner: type) -> str | None:
        return self._of_class if mapped is None else mapped.__wrapped__.__doc__


_CALL = ("__call__",)  # apart: a type checker takes a slot of that name for no method


class Mapped(Generic[_P, _R]):
    # The call stands in a slot of the object. Python looks `__call__` up in the class, where it
    # finds the slot, and calls what is in it: in the steady state a callable in C++, with no Python
    # in between. A method would cost as much again as all the rest.
    __slots__ = (
        *_CALL,
        "__dict__",
        "__name__",
        "__qualname__",
        "__weakref__",
        "__wrapped__",
        "_decorator",
        "_dispatcher",
    )
    __doc__ = _DocOfFunction(  # pyright: ignore[reportAssignmentType]
        """A function that is mapped over devices, called like the one that it was made from.

        It has that one's name, documentation, signature and attributes, and is a method where that
        would be one.

        Attributes:
          __wrapped__: the function that it was made from.
        """
    )
    if TYPE_CHECKING:  # an annotation would be taken for one of the function

        def __call__(self, *args: _P.args, **kwargs: _P.kwargs) -> _R: ...

    def __init__(self, fun: Callable[_P, _R], dispatcher: Dispatcher, decorator: Callable):
        """`decorator` makes the same of a function, to pickle it."""
        self.__wrapped__ = fun
        self.__name__: str = getattr(fun, "__name__", type(fun).__name__)
        self.__qualname__: str = getattr(fun, "__qualname__", self.__name__)
        own = getattr(fun, "__dict__", {})  # but for what would hide methods of this class
        self.__dict__.update({key: own[key] for key in own if not hasattr(Mapped, key)})
        self.__dict__["__module__"] = getattr(fun, "__module__", None)
        self.__dict__["__annotations__"] = getattr(fun, "__annotations__", {})
        self._dispatcher, self._decorator = dispatcher, decorator
        dispatcher.serve(self)

    def lower(self, /, *args: Any, **kwargs: Any) -> jax.stages.Lowered:
        """The program for these arguments, or for arguments of these types.

        Args:
          *args: as in a call; `jax.ShapeDtypeStruct` will do for arrays.
          **kwargs: the same.

        Returns:
          The program, on arguments that are cut over the devices. Compiled, it is called like this
          function; captured arrays are handed in behind the scenes.
        """
        return self._dispatcher.lower(*args, **kwargs)

    def trace(self, /, *args: Any, **kwargs: Any) -> jax.stages.Traced:
        """The jaxpr for these arguments, or for arguments of these types; see `jax.jit`."""
        return self._dispatcher.trace(*args, **kwargs)

    def eval_shape(self, /, *args: Any, **kwargs: Any) -> Any:
        """The types of the results for these arguments; nothing is compiled."""
        return self.trace(*args, **kwargs).out_info

    @property
    def jitted(self) -> Callable[_P, _R]:
        """The bare jit object, which moves no arguments, and says nothing of those it refuses."""
        kept: Any = functools.partial(self._dispatcher.jitted)  # Any: its class has no such names
        # It keeps the function alive: in `pmap(lambda x: x).jitted` nothing else does.
        kept.mapped, kept.lower, kept.trace = self, self.lower, self.trace
        return kept

    @overload
    def __get__(self, instance: None, owner: type | None = None) -> "Mapped[_P, _R]": ...
    @overload
    def __get__(
        self: "Mapped[Concatenate[Any, _Q], _R]", instance: object, owner: type | None = None
    ) -> Callable[_Q, _R]: ...
    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    def __repr__(self) -> str:
        where = definition(self.__wrapped__)
        # chex tells functions that JAX traces from others by "pmap." in this text.
        return f"<jax_dist.pmap.Mapped of {self.__qualname__}{f' at {where}' if where else ''}>"

    def __copy__(self) -> "Mapped[_P, _R]":
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> "Mapped[_P, _R]":
        return self

    def __reduce__(self) -> str | tuple[Callable[..., Any], tuple[Any, ...]]:
        """By name where a name leads here, as functions are pickled; else what it was made of."""
        found: Any = sys.modules.get(self.__dict__["__module__"] or "")
        for part in self.__qualname__.split("."):
            found = getattr(found, part, None)
        if found is self:
            return self.__qualname__
        return self._decorator, (self.__wrapped__,)
