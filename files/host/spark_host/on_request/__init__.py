"""On-demand models: a request to a stopped service starts the service and waits for it."""
