"""Proves a migration: runs the program, and says of each place how sure it is."""
