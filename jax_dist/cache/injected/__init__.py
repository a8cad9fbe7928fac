"""Runs inside the user's program and has it recorded, as `jax-dist cache verify` wants it.

The program may run under another Python, without jax_dist, and may import jax late: nothing here
imports either of them before the program has jax. This package has another name there.
"""
