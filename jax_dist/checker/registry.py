"""How a rule is written down: its page, when it is asked, what it looks for, and its cases."""

import dataclasses
import re
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

from jax_dist.checker.findings import Fix
from jax_dist.checker.modules import Module
from jax_dist.checker.page import Page

Version: TypeAlias = tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Found:
    """What a check yields: where, one sentence, and perhaps a fix."""

    node: Any  # of the tree, with its place
    message: str
    fix: Fix | None = None
    needs: Version = (0,)  # like the rule's, of this fix alone


@dataclasses.dataclass(frozen=True, slots=True)
class Keep:
    """A case in which the rule must say nothing."""

    why: str
    code: str
    path: str = "case.py"


@dataclasses.dataclass(frozen=True, slots=True)
class Flag:
    """A case in which the rule must find exactly this many things, at these lines."""

    why: str
    code: str
    lines: tuple[int, ...]
    path: str = "case.py"


@dataclasses.dataclass(frozen=True, slots=True)
class Mend:
    """A case whose fixes, of any safety but display-only, turn `before` into `after`."""

    why: str
    before: str
    after: str
    runs: bool = False  # whether both define `result()`, to be run on 8 devices and compared


Case: TypeAlias = Keep | Flag | Mend
Check: TypeAlias = Callable[[Module], Iterator[Found]]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Rule:
    """A page and the check that finds what it speaks of."""

    page: Page
    check: Check
    triggers: tuple[bytes, ...]  # phrases; a file that holds none of them cannot have a finding
    since: Version  # the first jax that has what the rule advises
    needs: Version  # the first jax on which the fixed code runs
    also: tuple[bytes, ...]  # a file that holds not all of these cannot have a finding either
    narrow: Mapping[bytes, re.Pattern[bytes]]  # by trigger: what must be found where it is


def rule(
    page: Page,
    *,
    triggers: tuple[bytes, ...],
    since: Version = (0,),
    needs: Version = (0,),
    also: tuple[bytes, ...] = (),
    narrow: Mapping[bytes, re.Pattern[bytes]] = types.MappingProxyType({}),
) -> Callable[[Check], Rule]:
    """Makes a rule of a check, `check(module) -> Iterator[Found]`.

    Args:
      page: what it says.
      triggers: phrases as in `prefilter.Phrases`, one of which every file with a finding holds.
      since: silent in projects that must run on a jax older than this.
      needs: its fix is withheld from projects that must run on a jax older than this.
      also: phrases, all of which every file with a finding holds too.
      narrow: for triggers that many files hold in another sense, the pattern that tells: a file
        without a match does not count as holding the trigger.
    """
    return lambda check: Rule(page, check, triggers, since, needs, also, narrow)
