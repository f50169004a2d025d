"""Errors a user can meet. Each names the field, the value and the limit it broke.

- A value wrong by itself (settings, configuration) raises `InvalidValue` where it is built.
- What admission refuses ends that one request; `generate` returns it in place as a result with `error` set.
- `EngineDead` is sticky: every waiter and every later call gets it.
- A message stays readable whatever value it quotes: of a long one the middle is left out.
"""

from __future__ import annotations

LONGEST_MESSAGE, KEPT_OF_EACH_END = 1000, 300


def shortened(message: str) -> str:
    """The message, or its two ends if it is too long to read."""
    if len(message) <= LONGEST_MESSAGE:
        return message
    begin, end = message[:KEPT_OF_EACH_END], message[-KEPT_OF_EACH_END:]
    return f"{begin} ... ({len(message) - len(begin) - len(end)} characters) ... {end}"


def described(error: BaseException) -> str:
    """Kind and message of an error of code that is not ours: even to ask for its message may raise."""
    try:
        return shortened(f"{type(error).__name__}: {error}")
    except Exception as other:
        return f"{type(error).__name__}, whose message raises {type(other).__name__}"


def shown(value: object) -> str:
    """A caller's value as it is written, whatever it is: an integer of 10,000 digits has no text in Python."""
    try:
        return repr(value)
    except Exception:
        size = f" of {value.bit_length()} bits" if isinstance(value, int) else ""
        return f"<{type(value).__name__}{size}>"


class PerdureError(Exception):
    """Base of every error this package raises on purpose."""

    def __init__(self, message: str = "") -> None:
        super().__init__(shortened(message))


class InvalidValue(PerdureError, ValueError):
    """A setting, prompt or id outside what is allowed; the message names field, value and limit."""


class MaxSequenceLengthOverflow(InvalidValue):
    """The prompt leaves no room under `max_model_len`."""


class ModelLoadError(PerdureError, ValueError):
    """A model's files are damaged, incomplete or of a kind that is not supported."""


class ModelNotFound(ModelLoadError, FileNotFoundError):
    """Nothing usable lies where the model was looked for."""

    __str__ = Exception.__str__


class StateError(PerdureError, RuntimeError):
    """The engine's state does not allow this call; nothing was changed."""


class DeviceError(PerdureError, RuntimeError):
    """The device could not give memory back, take it again, or load weights."""


class QueueFull(PerdureError, RuntimeError):
    """The waiting queue has reached `max_num_waiting`."""


class EngineDead(PerdureError, RuntimeError):
    """The engine met a fault it cannot recover from; it stays dead and says why."""


class ReplicaLost(PerdureError, RuntimeError):
    """The replica that computed this request is gone, and none took its place (`on_replica_loss`, `replica_wait_s`)."""


class JournalError(PerdureError, ValueError):
    """The file is no journal, a damaged one, or a replay went another way."""


class StepFailed(PerdureError, RuntimeError):
    """The step that held this request raised; the request ends with this error."""


class BadLogits(StepFailed):
    """The model left this request nothing to draw from, or to score its prompt by."""


class NothingToSample(StepFailed, ValueError):
    """What the request asked allows no next token: its settings contradict each other, or its grammar leads nowhere.
    It ends with this error, and has the tokens before."""
