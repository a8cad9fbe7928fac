"""Runs of a program, before and after a migration, and the comparison of its mapped calls."""
