"""The gateway of a service: nginx, key, addresses, traffic; for engine, rollout, status."""
