"""Runs the rules over files.

In come paths and settings; out come findings that nobody has switched off, or files mended by the
fixes of these. A file is parsed only if its bytes hold a word that a rule looks for. No fix is
applied that leaves text which does not parse or which has findings that it had not before.
"""
