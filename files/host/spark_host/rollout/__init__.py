"""The change of a service to another release, with a way back; it starts and stops engines."""
