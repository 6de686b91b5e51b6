"""Tools of maintainers: page generators and releases."""
