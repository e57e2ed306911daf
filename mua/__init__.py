"""mua: reinforcement learning of multi-turn, tool-using agents that talk with users.

Importing this package loads neither torch nor sglang; see ``docs/architecture.md`` for the rooms.
"""

__version__ = "0.1.0"
