"""Commands that look, at hosts or at what is published, and change nothing."""
