"""Published tables and figures, one module each: ``Config`` and ``run(config) -> Result``."""

from ritz.studies._evidence import Evidence, evidence
from ritz.studies._protocol import available, configure, find, run, sized, write

__all__ = ["Evidence", "available", "configure", "evidence", "find", "run", "sized", "write"]
