"""Settings of owners: read, merged and validated before any connection."""
