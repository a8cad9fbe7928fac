"""The codemod: what of a program changes, why, and the proof that it computes the same."""
