"""One module a rule: its page, its check, its cases."""
