"""All rules, by code."""

from jax_dist.checker.findings import Code
from jax_dist.checker.page import Page
from jax_dist.checker.registry import Case, Rule
from jax_dist.checker.rules import pmap_call, psum_of_one, syntax_error

_MODULES = (
    pmap_call,
    psum_of_one,
    syntax_error,
)

RULES: dict[Code, Rule] = {module.PAGE.code: module.check for module in _MODULES}
PAGES: dict[Code, Page] = {module.PAGE.code: module.PAGE for module in _MODULES}
CASES: dict[Code, tuple[Case, ...]] = {module.PAGE.code: module.CASES for module in _MODULES}
DEFAULT: frozenset[Code] = frozenset(code for code, page in PAGES.items() if page.default)
