"""The training backend: Megatron-Core on GPU and CPU.

Importing any module of this package first puts :mod:`mua.compat.megatron_cpu` in front of ``megatron.core``.
"""

from mua.compat import megatron_cpu

megatron_cpu.install()
