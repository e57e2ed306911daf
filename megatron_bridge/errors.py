"""The one exception of this package."""


class BridgeError(Exception):
    """A checkpoint and a model do not fit together. The message names the file, tensor or key, and the mend."""
