"""The engine: container, memory, caches, start, stop and client."""
