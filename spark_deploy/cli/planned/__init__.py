"""Commands about what a deploy would do, and the names that it goes by."""
