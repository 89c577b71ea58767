"""Errors that are neither a fault of what was given nor a bug."""


class ClusterError(RuntimeError):
    """A cluster that cannot go on: its machines, or what runs on them, must be looked at."""
