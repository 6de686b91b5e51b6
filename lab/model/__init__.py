"""The `lab-tiny` model repositories."""
