"""The one error that the demo's user is meant to read, without a traceback."""


class DemoError(RuntimeError):
    """The demo cannot run here, or it found something wrong."""
