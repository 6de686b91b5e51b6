"""What ``spark-deploy add`` writes: a file of the catalog, from a repository or a recipe."""
