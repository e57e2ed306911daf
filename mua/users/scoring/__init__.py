"""Answers found in what a policy says, and compared with references."""
