"""The engine's container: its account, variables, devices and processes."""
