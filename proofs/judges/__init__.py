"""What is demanded of answers, logits and modules, from numbers to a verdict."""
