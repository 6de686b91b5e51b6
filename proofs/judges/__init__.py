"""Judges of answers, logits and modules."""
