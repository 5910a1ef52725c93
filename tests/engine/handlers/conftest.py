"""Compiling takes longer than hypothesis allows an example."""

from hypothesis import settings

settings.register_profile("compiled", deadline=None)
settings.load_profile("compiled")
