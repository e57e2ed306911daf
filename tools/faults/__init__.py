"""The parts of ``tools/chaos.py``: faults drawn by seed, a run they strike, and what must be left of it."""
