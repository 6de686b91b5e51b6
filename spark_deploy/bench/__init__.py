"""Measures what a host serves, through its gateway, and shows results beside each other."""
