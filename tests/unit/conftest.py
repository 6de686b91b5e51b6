"""Rules for all unit tests."""

from hypothesis import settings

# An example that takes long says that the machine is busy, not that the code is wrong.
settings.register_profile("patient", deadline=None)
settings.load_profile("patient")
