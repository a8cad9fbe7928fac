"""What merged programs call; it waits for the program to import jax, for that may take settings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from . import journal

_ran: set[int] = set()


def ran(place: int) -> None:
    """The statement of a place is about to run."""
    if place not in _ran:
        _ran.add(place)
        journal.note(place, "ran")


def both(place: int, old: Callable[[], Any], new: Callable[[], Any]) -> Any:
    """The value of the old form, compared with that of the new one.

    Args:
      place: its number.
      old: evaluates the old form.
      new: evaluates the new one.
    """
    from . import pairs

    ran(place)
    return pairs.both(place, old, new)


def host(place: int, function: Callable[[Any], Any], value: Any) -> Any:
    """What a host edit gives, written down.

    Args:
      place: its number.
      function: what it puts around the value.
      value: what it takes.
    """
    from . import start

    recorder = start.recorder()
    return function(value) if recorder is None else recorder.host(place, function, value)
