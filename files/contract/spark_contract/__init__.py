"""What controller and hosts agree on: documents, paths, names. Standard library only."""
