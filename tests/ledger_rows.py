"""The table of the tests of ledgers."""

from __future__ import annotations

from tests import pgoutput

ITEM = pgoutput.relation(1, "public", "item", [("id", 23, True), ("name", 25)])
