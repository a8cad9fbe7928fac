"""The cases of the rules: one file for each, named as its rule.

First where the rule must be silent, then what it finds, then what its fixes write.
"""

import dataclasses
import importlib
import pkgutil
from typing import TypeAlias

from jax_dist.lint.engine.linter import RULES


@dataclasses.dataclass(frozen=True, slots=True)
class Negative:
    """A case in which the rule must say nothing."""

    why: str
    code: str
    path: str = "case.py"


@dataclasses.dataclass(frozen=True, slots=True)
class Positive:
    """A case in which the rule must find exactly this many things, at these lines.

    No finding has a fix that `--fix` or `--unsafe-fixes` would apply: those are `Fixed`.
    """

    why: str
    code: str
    lines: tuple[int, ...]
    path: str = "case.py"


@dataclasses.dataclass(frozen=True, slots=True)
class Fixed:
    """A case whose fixes, of any safety but display-only, turn `before` into `after`."""

    why: str
    before: str
    after: str
    runs: bool = False  # whether both define `result()`, to be run on 8 devices and compared


Case: TypeAlias = Negative | Positive | Fixed


def by_code() -> dict[str, tuple[Case, ...]]:
    """Return the cases of each rule, by its code."""
    by_name = {rule.name.replace("-", "_"): code for code, rule in RULES.items()}
    names = sorted(each.name for each in pkgutil.iter_modules(__path__))
    unknown = [name for name in names if name not in by_name]
    assert not unknown, f"no rule has the name of {unknown}, or two rules have one code"
    return {by_name[name]: importlib.import_module(f"{__name__}.{name}").CASES for name in names}
