"""What service domains are made of: databases without copies, how an agent has to conduct itself, scripted customers.

No domain itself: :mod:`mua.environment.registry` passes it over. The core knows nothing of it.
"""
