"""Every error that xorl_lab raises on purpose.

    LabError (RuntimeError)
    ├── ConfigError      (also ValueError)   a setting is wrong: name, range, combination
    ├── DataError        (also ValueError)   a prompt, datum or reward is wrong
    │   └── ShapeError                       lengths or shapes disagree
    ├── EngineError                          training could not be carried out
    ├── SamplerError     (.retryable)        sampling could not be carried out
    ├── CheckpointError  (.code, .details)   a checkpoint is missing, taken, damaged or does not fit
    ├── StoreError                           the store of runs could not be read or written
    └── CancelledError                       the call was cancelled before it had an effect

All of them pickle, so they cross process boundaries unchanged.  Each message says what was got,
what was expected and what to do next.
"""

from collections.abc import Mapping


class LabError(RuntimeError):
    """Base of all errors of this package."""


class ConfigError(LabError, ValueError):
    """A setting has a wrong name, type, range or combination."""


class DataError(LabError, ValueError):
    """A prompt, datum, reward or other piece of data cannot be used."""


class ShapeError(DataError):
    """Lengths or shapes disagree; the message names each with its size."""


class EngineError(LabError):
    """A training operation could not be carried out; the model is as it was before it."""


class SamplerError(LabError):
    """Sampling could not be carried out.

    Args:
        message: what happened and what to do.
        retryable: True if the same request may succeed when sent again.
    """

    def __init__(self, message: str, retryable: bool = False) -> None:
        super().__init__(message)
        self.retryable = retryable

    def __reduce__(self) -> tuple[type, tuple[str, bool]]:
        return type(self), (str(self), self.retryable)


class CheckpointError(LabError):
    """A checkpoint is missing, already there, damaged, or does not fit the model.

    Args:
        code: stable, machine-readable, e.g. ``validation.invalid_checkpoint_name``.
        message: what happened and what to do.
        details: every fact behind the code, e.g. all fields that differ.
    """

    def __init__(
        self, code: str, message: str, details: Mapping[str, object] | None = None
    ) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message
        self.details = dict(details or {})

    def __reduce__(self) -> tuple[type, tuple[str, str, dict[str, object]]]:
        return type(self), (self.code, self.message, self.details)


class StoreError(LabError):
    """The store of runs could not be read or written, or does not hold what was asked of it."""


class CancelledError(LabError):
    """The call was cancelled, by ``future.cancel()`` or because its client was closed."""
