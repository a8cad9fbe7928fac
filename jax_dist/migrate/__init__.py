"""The codemod: what of a program changes, why, and the proof that it computes the same.

In come files, the target (`--to`) and what the user promises of the program; out come new texts of
files, and for each place what was done, or why it was left (`results`). `migration` takes the
files; a run of the program (`recorded_flow`) or a promise says what may be done; `pmap_renames`,
`shard_map`, `idiomatic` and `global_state` do it, with the text of `codegen`; `verify` proves it.

Nothing here imports jax. A place that cannot be shown to stay the same is left, with a reason and
its line. A text that does not parse, or that reads a name too early, is never returned.
"""
