"""Whole servers with the arguments of a profile, asked over HTTP."""
