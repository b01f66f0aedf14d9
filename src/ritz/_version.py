"""The version number, in a module so that an uninstalled source tree knows it too."""

__version__ = "0.1.0"
