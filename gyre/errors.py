"""Pure. Every error that gyre raises on purpose, in one tree.

    GyreError
    ├── ConfigError          a config, streams.yaml or command line that cannot be meant
    ├── HeldError            a file that another process is using, often for a moment only
    ├── MissingError         something that must be installed or created first; says how
    ├── LogError
    │   ├── CodecError       a body that is malformed, truncated or altered
    │   ├── ConflictError    a compare-and-set that lost: somebody else wrote first
    │   ├── DuplicateError   an acknowledged id with another body: two writers share a name
    │   ├── StreamError      the stream is missing, differs from streams.yaml, or is full
    │   └── BlobError        a blob is missing or its digest is wrong
    ├── ConsumerError        a consumer that failed on an event; names the sequence
    ├── FoldError            a recorded event that cannot follow what came before it
    ├── ReplayError          a replay that differs from the record; names the first sequence
    ├── HarnessError         a harness that is not installed, exits at once, hangs or speaks rubbish
    ├── SandboxError         the sandbox cannot be built
    ├── TaskError            a task that cannot be graded
    ├── EvaluationError      grading failed: no score, which is not a score of 0
    │   └── GraderKilled     it was ended by a signal, before it had said anything
    ├── EngineError          the engine refused, failed or went away
    ├── PolicyError          a checkpoint that is missing, torn or of another shape
    ├── TrainingError        a step that a guard refused, by name; the update it is of was not made
    ├── TransferError        weights that did not arrive whole
    └── ProcessError         a supervised process ended when it should not have

A message names the boundary, the value and the remedy. A failed execution is an event, not an
exception; a bug is any other exception, and crashes.
"""

REFUSED = 78
"""Exit code of a process of a run that would only end the same way again: its supervisor does not restart it."""


class GyreError(Exception):
    """Base of the tree: the CLI prints these in one line and exits with 1."""


class ConfigError(GyreError): ...


class HeldError(GyreError): ...


class MissingError(GyreError): ...


class LogError(GyreError): ...


class CodecError(LogError): ...


class ConflictError(LogError): ...


class DuplicateError(LogError): ...


class StreamError(LogError): ...


class BlobError(LogError): ...


class ConsumerError(GyreError): ...


class FoldError(GyreError): ...


class ReplayError(GyreError): ...


class HarnessError(GyreError): ...


class SandboxError(GyreError): ...


class TaskError(GyreError): ...


class EvaluationError(GyreError): ...


class GraderKilled(EvaluationError): ...


class EngineError(GyreError):
    """`status` is the HTTP status of an engine that answered; None when it is gone or did not answer.

    `retry_after_s` is what it asked for; 0 for nothing.
    """

    def __init__(self, message: str, status: int | None = None, retry_after_s: int = 0) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after_s = retry_after_s


class PolicyError(GyreError): ...


class TrainingError(GyreError):
    """`guard` is the one that refused; `value` and `bound` are 0 for what is not finite."""

    def __init__(self, message: str, guard: str = "non_finite", value: float = 0.0, bound: float = 0.0) -> None:
        super().__init__(message)
        self.guard, self.value, self.bound = guard, value, bound


class TransferError(GyreError): ...


class ProcessError(GyreError): ...


def is_passing(error: BaseException) -> bool:
    """Whether the same work may go well when it is begun again: what it needs was away."""
    return isinstance(error, (HeldError, StreamError, BlobError, EngineError, TransferError))
