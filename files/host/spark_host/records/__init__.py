"""Records of releases: boot pointer, good releases, proofs, versions."""
