"""The one kind of error that is the caller's to mend, which the command line shows as text instead of a traceback."""


class Refusal(ValueError):
    """Input that cannot be used. The message fits on one screen: what was given, and what would be accepted."""
