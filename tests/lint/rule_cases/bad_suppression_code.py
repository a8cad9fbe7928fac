"""Cases of JXD902."""

from rule_cases import Case, Negative

CASES: tuple[Case, ...] = (Negative("a code of another tool", "import os  # noqa: XYZ123\n"),)
