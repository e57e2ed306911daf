"""Errors a person is meant to read: one line that names what is wrong, where, and the mend.

The command line prints a :class:`MuaError` without a traceback and exits with status 2; anything else is
a fault of the program and keeps its traceback.
"""


class MuaError(Exception):
    """Base of every error whose message is meant for the person who runs the program."""


class ConfigError(MuaError):
    """A configuration file or override is wrong. The message names file, key and the nearest valid name."""


class ModelError(MuaError):
    """A model folder or checkpoint is missing, incomplete, or of another shape than configured."""


class DamagedCheckpoint(ModelError):
    """A checkpoint is not what was written: a file is missing, cut short, or has other bytes."""


class EngineError(MuaError):
    """The inference engine did not start, died, or answered something that cannot be used."""


class EnvironmentFault(MuaError):
    """An environment raised or hung outside what the policy can be blamed for."""


class UserFault(MuaError):
    """The simulated user could not be asked: endpoint down, bad credentials, empty or broken answer."""


class JudgeFault(MuaError):
    """A judge could not be asked, or gave no verdict that can be read. Never scored as 0."""


class Preempted(MuaError):
    """A signal asked the run to leave before its end. The same command continues it; exit status 75."""


class DeadlineExceeded(MuaError):
    """A named wait ran past its deadline. The message names the wait and the seconds it was given."""
