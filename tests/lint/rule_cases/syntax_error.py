"""Cases of JXD901."""

from rule_cases import Case, Negative

CASES: tuple[Case, ...] = (Negative("a file that parses", "import jax\n"),)
