"""Runs inside the user's program and writes down what its mapped functions are given and return.

The program may run under another Python, without jax_dist: nothing here imports the rest of it,
and modules of this package import each other by relative names, for there it has another name.
"""
