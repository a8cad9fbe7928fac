"""Cases of JXD900."""

from rule_cases import Case, Negative

CASES: tuple[Case, ...] = (Negative("a comment of another tool", "import os  # noqa: F401\n"),)
