"""The catalogue of rules: one code, one name, one page, for the checker and for the rewriting.

Imports nothing of JAX.
"""
