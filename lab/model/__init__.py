"""Makes the `lab-tiny` model repositories: small, trained, with the layout of the originals."""
