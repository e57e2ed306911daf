"""``mua`` as a machine with a GPU and Transformer Engine would run it, on the CPU with the stand-in.

    python -m tests.te_command train recipe.yaml ...

The stand-in is on the import path of this process alone: engines and other children do not see it.
"""

import os
import sys

from tests.te_ranks import STAND_IN, gpu


def main() -> None:
    sys.path.insert(0, str(STAND_IN))
    os.environ["TORCH_COMPILE_DISABLE"] = "1"  # Megatron's small compiled functions compute the same without
    from mua import cli
    from mua.megatron.capabilities import pretending

    with pretending(gpu()):
        cli.main()


if __name__ == "__main__":
    main()
