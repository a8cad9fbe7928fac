"""The codemod behind `jax-dist migrate`: from `jax.pmap` to what replaces it.

It reads and edits source text and never imports jax; programs run in processes of their own.
"""
