"""The check: sends a running engine questions and judges answers, metrics and log."""
