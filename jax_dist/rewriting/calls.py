"""The calls of a rewritten function that its first trace, or jit, did not let pass.

All are entries: what is traced for them finds the arguments here, where they are now.
"""

from typing import Any

from jax_dist.mapping.attempts import Misplaced, entry
from jax_dist.passes.lifting import NewCaptures
from jax_dist.rewriting.program import RewrittenProgram


@entry
def ask(method: str, dispatcher: RewrittenProgram, args: tuple, kwargs: dict) -> Any:
    """`lower` or `trace`."""
    return dispatcher.ask(method, args, kwargs)


@entry
def settle(
    unsettled: NewCaptures | Misplaced, dispatcher: RewrittenProgram, args: tuple, kwargs: dict
) -> Any:
    """Makes a call again, with captured arrays as arguments and a first state in its place."""
    args, kwargs = dispatcher.placed(unsettled, args, kwargs)
    try:
        return dispatcher.settle(unsettled, args, kwargs)
    except ValueError as error:
        refusal = error
    return call_elsewhere(refusal, dispatcher, args, kwargs)


@entry
def call_elsewhere(
    refusal: ValueError, dispatcher: RewrittenProgram, args: tuple, kwargs: dict
) -> Any:
    """Makes a call that jit refused, if that was for arguments on other devices."""
    args, kwargs = dispatcher.moved(refusal, args, kwargs)
    try:
        return dispatcher.dispatch(*args, **kwargs)
    except (NewCaptures, Misplaced) as error:
        unsettled = error
    return settle(unsettled, dispatcher, args, kwargs)
