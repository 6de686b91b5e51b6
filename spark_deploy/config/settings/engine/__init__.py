"""What an owner may tell the engine itself: options, variables, a template, a text to tune with."""
