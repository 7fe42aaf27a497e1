"""Tests, sorted by what they need: unit, integration, conformance, chaos."""
