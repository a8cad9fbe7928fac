"""The step that a program calls: the program runs up to it, and no further."""

import contextlib
import functools
import os
import sys
import sysconfig
import types
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import jax
from jax.core import Tracer

from jax_dist._pmap.axes import function_name
from jax_dist._rewrite.pipeline import place_of
from jax_dist._usage import hint
from jax_dist.errors import UnsupportedError, refusal
from jax_dist.machines.steps import MappedStep


def step_of(program: Callable[[], object], name: str | None = None) -> MappedStep:
    """Runs a program until it calls its training step, and gives that.

    Without a name, it is the first mapped function that takes what one of its results is like, and
    something else, as a batch; or, if it takes nothing else, the first that gets its own results.

    Args:
      program: runs it; what it maps with `jax.pmap` or `jax_dist.pmap` is looked at.
      name: of the function that is mapped.

    Raises:
      UnsupportedError: the program ended, or raised, before it called such a function.

    >>> def train():
    ...     step = jax.pmap(lambda w, x: (w - x, (w * x).sum()))
    ...     w = x = jax.numpy.ones((8, 3))
    ...     while True:
    ...         w, loss = step(w, x)
    >>> step_of(train).slices
    (ShapeDtypeStruct(shape=(3,), dtype=float32), ShapeDtypeStruct(shape=(3,), dtype=float32))
    """
    search = _Search(name)
    ended: BaseException | None = None
    with search.watching():
        try:
            program()
        except (Exception, SystemExit, _Reached) as error:  # noqa: BLE001  # told below
            ended = error
    if search.found is not None:  # even if the program caught what was to end it
        return search.found
    looked_for = f"'{name}'" if name else "a training step, which gets its result again"
    how = next((how for kind, how in _ENDS.items() if isinstance(ended, kind)), "ended")
    raise refusal(
        UnsupportedError,
        what=f"the program {how} before it called {looked_for}",
        which=[*_told(ended), *search.told()],
        why="the step is planned by the arguments that it gets",
        do=search.advice(is_broken=isinstance(ended, Exception)),
    ) from ended


class _Reached(BaseException):
    """Ends the program: no `except Exception` of its own keeps it."""


_ENDS = {_Reached: "came to its step", SystemExit: "exited", Exception: "raised"}


def _told(error: BaseException | None) -> list[str]:
    """What ended the program, with the place in it."""
    if error is None or isinstance(error, _Reached):
        return []
    place = place_of(error, ("<", *_INSTALLED))
    at = f", at {place[0]}:{place[1]}" if place else ""
    return [f"{type(error).__name__}: {error}{at}"]


_INSTALLED = tuple(
    folder + os.sep
    for name, folder in sysconfig.get_paths().items()
    if name in ("stdlib", "platstdlib", "purelib", "platlib")
)


class _Search:
    """What a program maps, and calls."""

    def __init__(self, name: str | None):
        self.found: MappedStep | None = None
        self._name = name
        self._mapped: list[str] = []  # the names of all mapped functions
        self._called: dict[Callable, str] = {}  # why it is not the step
        self._returned: dict[Callable, list[Any]] = {}  # by those that take only their state

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for home in (jax, sys.modules["jax_dist"]):  # where programs find it
                watched = self._watched_way(home.pmap)
                stack.enter_context(mock.patch.object(home, "pmap", watched))
            yield

    def told(self) -> list[str]:
        told = [f"it called {function_name(each)}: {why}" for each, why in self._called.items()]
        return told or ["it called no function that jax.pmap or jax_dist.pmap has mapped"]

    def advice(self, *, is_broken: bool) -> str:
        if is_broken:
            return "Mend what it raised; --devices says how many devices it sees."
        if self._name is None or not self._mapped:
            return "Give the name of a mapped function that it calls."
        return hint(self._name, self._mapped, "Give the name of a mapped function.")

    def _watched_way(self, way: Callable) -> Callable:
        def pmap(*args: Any, **kwargs: Any) -> Any:
            if not args and "fun" not in kwargs:
                return functools.partial(pmap, **kwargs)
            made = way(*args, **kwargs)
            self._mapped.append(function_name(made))
            return _Watched(made, self._call)

        return pmap

    def _call(self, function: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
        if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves((args, kwargs))):
            return function(*args, **kwargs)  # a part of what is compiled
        self._look(function, args, kwargs)
        result = function(*args, **kwargs)
        if function in self._returned:
            self._returned[function] = jax.tree.leaves(result)
        return result

    def _look(self, function: Callable, args: tuple, kwargs: dict[str, Any]) -> None:
        """Ends the program if this is the step, or if it trains and there is none of the name."""
        own = {id(leaf) for leaf in self._returned.get(function, [])}
        again = any(id(leaf) in own for leaf in jax.tree.leaves((args, kwargs)))
        if not again and function in self._called:
            return
        step = MappedStep.of_mapped(function, args, kwargs)
        carried = step.state(jax.local_device_count())
        others = {owner for owner in step.call.owners if owner not in carried}
        is_named = self._name == function_name(function)
        if is_named or again or (carried and others):
            if is_named or self._name is None:
                self.found = step
                raise _Reached
            self._called[function] = "another name"
            if self._name not in self._mapped:  # it would train to its end
                raise _Reached
            return
        if carried:
            self._returned[function] = []
        self._called[function] = (
            "nothing else goes in" if carried else "no result is like an argument"
        )


class _Watched:
    """A mapped function that is looked at before each call."""

    def __init__(self, function: Callable, call: Callable[[Callable, tuple, dict], Any]):
        self._watched_function, self._watched_call = function, call
        for name in ("__name__", "__qualname__", "__doc__", "__module__"):
            setattr(self, name, getattr(function, name, None))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._watched_call(self._watched_function, args, kwargs)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_watched"):  # copied before __init__
            raise AttributeError(name)
        return getattr(self._watched_function, name)
