"""Megatron-Core names classes of the operation fuser when it is asked for them; the stand-in has none."""
