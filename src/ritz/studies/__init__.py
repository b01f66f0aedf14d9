"""Published tables and figures, one module each: ``Config`` and ``run(config) -> Result``."""

from ritz.studies._protocol import available, configure, find, write

__all__ = ["available", "configure", "find", "write"]
