"""All rules, by code: each file in the folder of the rules is one."""

import importlib
import pkgutil
import types

from jax_dist.checker import rules
from jax_dist.checker.model.findings import Code
from jax_dist.checker.rules import Page, Rule


def _modules() -> dict[Code, types.ModuleType]:
    found = (
        importlib.import_module(f"{rules.__name__}.{each.name}")
        for each in pkgutil.iter_modules(rules.__path__)
        if not each.name.startswith("_")
    )
    return {module.PAGE.code: module for module in sorted(found, key=lambda each: each.PAGE.code)}


MODULES = _modules()
RULES: dict[Code, Rule] = {code: module.check for code, module in MODULES.items()}
PAGES: dict[Code, Page] = {code: module.PAGE for code, module in MODULES.items()}
DEFAULT: frozenset[Code] = frozenset(code for code, page in PAGES.items() if page.default)
