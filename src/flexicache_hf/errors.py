"""Warnings and errors of this package's own; all others are built in, with messages that advise."""


class FlexiCacheWarning(UserWarning):
    """Something works, but not as well as it could: the message says what to change."""


class AttentionNotLinked(RuntimeError):
    """The model's attention function is not ours, so decode steps would miss pages."""


class InterruptedForward(RuntimeError):
    """A forward pass stopped between two layers, so the layers disagree about what is cached."""


class InterruptedChange(RuntimeError):
    """A change of rows or lengths stopped midway, so the parts of the cache disagree."""
