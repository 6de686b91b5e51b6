"""Settings, catalog and documents of owners, and errors in them."""
