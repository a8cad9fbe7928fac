"""The checker: finds what pmap-era code does in source text, without importing JAX.

In comes the bytes of files, and the settings of their project; out come findings, each with its
place and perhaps with a fix, which is a set of edits of bytes. Four rooms, each of which knows only
those after it:

- `output` writes findings for people and programs;
- `engine` finds the files' findings: settings, rules in turn, suppressions, and fixes applied;
- `rules` has one file for each rule;
- `model` knows what a file means: names, scopes, pmaps, where values come from, and its project.

Nothing here imports jax, runs or imports the code that it reads, or writes a file that was not
asked to be written.
"""
