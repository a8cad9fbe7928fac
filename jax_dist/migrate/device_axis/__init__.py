"""Programs without the axis over devices: which values can do without it, and what is written.

A recording (`recorded_flow`) shows what carries the axis. `layouts` decides for each component of
such values; `unrun` and `choices` say what the run did not show. `idiomatic` and `global_state`
write.
"""
