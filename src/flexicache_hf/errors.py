"""The warning category of this package; errors are the built-in ones with messages that advise."""


class FlexiCacheWarning(UserWarning):
    """Something works, but not as well as it could: the message says what to change."""


class AttentionNotLinked(RuntimeError):
    """The model's attention function is not ours, so decode steps would miss pages."""
