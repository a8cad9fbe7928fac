"""The function that `rewrite` returns: its trace goes through `_passes`, and becomes programs.

`program` has the calls, `remesh` the pass that moves pmaps, and `report` what `explain` shows.
"""
