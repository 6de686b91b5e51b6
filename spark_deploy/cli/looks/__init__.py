"""Commands that look at hosts and change nothing."""
