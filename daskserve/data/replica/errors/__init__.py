"""Errors of user code: in the log, and with notes on the rule that they break."""
