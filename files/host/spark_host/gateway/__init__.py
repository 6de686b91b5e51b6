"""The gateway of a service: nginx with an API key and a list of allowed routes."""
