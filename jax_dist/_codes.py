"""The codes of the rules that other parts of the package name, by the name of the rule.

A rule's own file holds its code and its page; no other file writes a code out.
"""

from typing import Final

PMAP_CALL: Final = "JXD001"
JIT_OF_PMAP: Final = "JXD002"
REMOVED_DEVICE_PUT: Final = "JXD101"
EXPERIMENTAL_SHARD_MAP: Final = "JXD105"
PJIT_TO_JIT: Final = "JXD106"
REMOVED_NAME: Final = "JXD108"
ALL_GATHER_THEN_REDUCE: Final = "JXD301"
GRADIENT_OF_REPLICATED: Final = "JXD303"
CAPTURED_ARRAY: Final = "JXD401"
CUSTOM_PARTITIONING_OUTSIDE_SHARD_MAP: Final = "JXD402"
UNSTABLE_TRACE_VALUE: Final = "JXD403"
CALLBACK_NOT_CACHED: Final = "JXD405"
CACHE_CONFIG: Final = "JXD406"
SYNTAX_ERROR: Final = "JXD901"
