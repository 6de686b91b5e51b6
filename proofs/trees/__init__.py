"""Checkpoints that the proofs load: small, made and built here, some broken on purpose."""
