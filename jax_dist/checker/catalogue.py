"""All rules, by code."""

from jax_dist.checker.findings import Code
from jax_dist.checker.page import Page
from jax_dist.checker.registry import Case, Rule
from jax_dist.checker.rules import (
    experimental_shard_map,
    jit_of_pmap,
    make_mesh_explicit,
    nested_pmap,
    pjit_to_jit,
    pmap_call,
    pmap_lower,
    pmap_untranslatable_argument,
    psum_of_one,
    pvary_to_pcast,
    removed_device_put_replicated,
    removed_device_put_sharded,
    removed_name,
    removed_pmap_config,
    removed_sharding_class,
    shard_map_no_jit,
    spec_tuple_compare,
    syntax_error,
)

_MODULES = (
    pmap_call,
    jit_of_pmap,
    nested_pmap,
    pmap_lower,
    pmap_untranslatable_argument,
    removed_device_put_replicated,
    removed_device_put_sharded,
    removed_sharding_class,
    removed_pmap_config,
    experimental_shard_map,
    pjit_to_jit,
    pvary_to_pcast,
    removed_name,
    spec_tuple_compare,
    make_mesh_explicit,
    shard_map_no_jit,
    psum_of_one,
    syntax_error,
)

RULES: dict[Code, Rule] = {module.PAGE.code: module.check for module in _MODULES}
PAGES: dict[Code, Page] = {module.PAGE.code: module.PAGE for module in _MODULES}
CASES: dict[Code, tuple[Case, ...]] = {module.PAGE.code: module.CASES for module in _MODULES}
DEFAULT: frozenset[Code] = frozenset(code for code, page in PAGES.items() if page.default)
