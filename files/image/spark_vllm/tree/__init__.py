"""The checkpoint as the plugin sees it: names, headers, settings, gates before it is loaded."""
