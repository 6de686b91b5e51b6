"""Makes the `lab-tiny` model repositories: small, trained, and laid out like the real ones."""
