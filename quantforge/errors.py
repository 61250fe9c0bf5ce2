"""Every error a user can cause or meet. Each says what, where, the numbers, and what to do about it."""


class QuantforgeError(Exception):
    """Base of all errors raised on purpose. The command line prints the message and exits with `exit_code`."""

    exit_code = 1


class UsageError(QuantforgeError):
    """The request itself is wrong: an unknown key, an impossible combination of options."""

    exit_code = 2


class SourceError(QuantforgeError):
    """A checkpoint cannot be read: missing, truncated, hostile or inconsistent files.

    `code` names the kind of fault for programs (``truncated``, ``shape``, ``version``, ...).
    """

    def __init__(self, text: str, code: str = "unreadable") -> None:
        self.code = code
        super().__init__(text)


class CalibrationError(QuantforgeError):
    """Calibration data is missing, empty, too short or of an unknown shape."""


class PlanError(QuantforgeError):
    """The model and the request do not fit. Carries every problem found, not only the first."""

    def __init__(self, problems: list[str]) -> None:
        self.problems = problems
        super().__init__("\n".join(problems))


class NumericsError(QuantforgeError):
    """Non-finite weights, activations or statistics; names the tensor or site."""


class WorkspaceError(QuantforgeError):
    """The work directory belongs to another run, is locked, or cannot be written."""


class VerifyError(QuantforgeError):
    """A written checkpoint does not read back as what the solver produced. Carries every mismatch."""

    def __init__(self, problems: list[str]) -> None:
        self.problems = problems
        super().__init__("\n".join(problems))
