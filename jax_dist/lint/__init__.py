"""The linter: finds what pmap-era code does in source text, without importing JAX.

Three packages, each of which knows only those after it: `engine` lints, fixes and reports; `rules`
has one file for each rule; `model` knows what a file means: names, scopes, pmaps, where values come
from, and its project. The files beside them are for all.
"""
