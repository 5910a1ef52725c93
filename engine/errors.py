"""The two ways a command ends badly. Both are one line for people: what is wrong, what to do."""

from __future__ import annotations


class Refused(Exception):
    """Bad arguments, or something the machine does not allow; nothing was started. Exit code 2."""


class Failed(Exception):
    """Something failed while running. Exit code 1."""
