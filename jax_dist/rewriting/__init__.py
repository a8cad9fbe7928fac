"""`rewrite` and `explain`: the passes on a whole function, and the report of what they did.

In comes the user's function with its options (`api`). `program` traces it once per signature, runs
the passes in their order, and keeps a jit object for each set of captured arrays; `remesh` moves
pmaps onto one mesh. Out comes a function that is called like the user's; or, for `explain`, a
report, for which `machines` measures the compiled programs.

The user's Python runs once per signature, and never to make a report. What cannot be shown to be
sound stays as the user wrote it, and the report says why.
"""
