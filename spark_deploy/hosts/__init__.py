"""Everything that talks to a host."""
