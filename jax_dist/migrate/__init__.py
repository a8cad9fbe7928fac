"""The codemod behind `jax-dist migrate`: it edits source text, and never imports jax."""
