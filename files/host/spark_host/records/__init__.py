"""What is written down of releases: boot pointer, good record, proofs, versions."""
