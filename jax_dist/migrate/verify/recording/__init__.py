"""Runs inside the user's program: changes what it imports, and records its mapped calls.

The program may run under another Python, without jax_dist: nothing here imports the rest of it,
and modules of this package import each other by relative names, for there it has another name.
"""
