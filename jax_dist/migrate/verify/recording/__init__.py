"""Runs inside the user's program: changes what it imports, and records its mapped calls.

The program's Python may lack jax_dist, and this package has another name there: nothing imports
the rest of jax_dist, and modules import each other by relative names.
"""
