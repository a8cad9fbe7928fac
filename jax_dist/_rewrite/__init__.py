"""The calls, the pass that moves pmaps, and the report of `rewrite`; other passes: `_passes`."""
