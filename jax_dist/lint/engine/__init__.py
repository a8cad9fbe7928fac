"""Settings, linting, suppressions, fixes and reports.

No fix is made that leaves text which does not parse, or which has findings that it had not before.
"""
