"""This package's own version, for all that has to name it before the package is there."""

VERSION = "0.1.0"
