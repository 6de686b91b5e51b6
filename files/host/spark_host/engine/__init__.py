"""The engine: its container, memory, caches, start and stop, and the client that talks to it."""
