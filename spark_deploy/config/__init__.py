"""What owners write: settings, catalog, documents, and the errors found in them."""
