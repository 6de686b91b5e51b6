"""What owners choose: read, merged and validated before any connection."""
