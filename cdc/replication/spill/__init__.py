"""Transactions that are sent before they end: their rows on disk."""
