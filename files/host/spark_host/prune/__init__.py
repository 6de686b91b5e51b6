"""What of ours lies on a host, and the removal of what no kept release needs."""
