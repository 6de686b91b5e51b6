"""First contact and every later one: host keys, what bootstrap grants, SSH."""
