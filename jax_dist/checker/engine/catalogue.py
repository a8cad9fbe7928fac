"""All rules, by code: every `Rule` in the files of their folder."""

import importlib
import pkgutil
import types

from jax_dist.checker import rules
from jax_dist.checker.model.findings import Code
from jax_dist.checker.rules import Page, Rule


def _found() -> dict[Code, tuple[types.ModuleType, Rule]]:
    modules = (
        importlib.import_module(f"{rules.__name__}.{each.name}")
        for each in pkgutil.iter_modules(rules.__path__)
        if not each.name.startswith("_")
    )
    found = (
        (each.page.code, (module, each))
        for module in modules
        for each in vars(module).values()
        if isinstance(each, Rule)
    )
    return dict(sorted(found, key=lambda each: each[0]))


_FOUND = _found()
MODULES: dict[Code, types.ModuleType] = {code: module for code, (module, _) in _FOUND.items()}
RULES: dict[Code, Rule] = {code: rule for code, (_, rule) in _FOUND.items()}
PAGES: dict[Code, Page] = {code: rule.page for code, rule in RULES.items()}
DEFAULT: frozenset[Code] = frozenset(code for code, page in PAGES.items() if page.default)
