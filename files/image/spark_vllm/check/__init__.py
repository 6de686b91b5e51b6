"""Checks whether the plugin supports the engine in which it runs."""
