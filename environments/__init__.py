"""Domains and gyms, each a package of its name; see ``docs/environments.md``."""

PROJECT = "mua"
"""Tells this package from another project's of the same name."""
