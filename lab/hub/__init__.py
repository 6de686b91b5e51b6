"""A model hub that serves local directories to the real hub client and to our own fetcher."""
