"""Servers with the arguments of a profile, tested over HTTP."""
