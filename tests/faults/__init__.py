"""Faults of the machine: kills at random moments, full disks, wrong clocks, damaged files.

    python -m tests.faults --kills 200

makes each of them, and counts what was released and is not charged for: that must be nothing.
"""
