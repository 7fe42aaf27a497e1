"""The product's version, the one place that says it; the package takes it from here."""

from __future__ import annotations

VERSION = "0.1.0"
