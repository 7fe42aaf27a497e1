"""Options of the source: what is wrong is named, with what to write."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from cdc.cursor import Cursor
from cdc.errors import ConfigError
from spark_pipeline.source.options import _DEFAULTS, _OURS, Options

PAGE = Path(__file__).parents[3] / "docs" / "spark.md"


def test_names_are_known_in_any_case_and_values_are_read() -> None:
    options = Options.read(
        {
            "PATH": "/log/shop",
            "maxrows": " 7 ",
            "TARGETMS": "250",
            "startingcursor": "16/B374D848:3",
            "table": "public.order.items",
        }
    )
    assert (options.path, options.rows_max, options.target_s) == ("/log/shop", 7, 0.25)
    assert options.starting == Cursor(0x16B374D848, 3)
    assert options.table == ("public", "order.items")
    assert options.partitions >= 1


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"maxRow": "1"}, "no option 'maxRow'. To fix it: write maxRows"),
        ({"startingCurser": "latest"}, "write startingCursor"),
        ({"zebra": "1"}, "use some of path, table, startingCursor"),
        ({"maxRows": "many"}, "maxRows is 'many'. To fix it: write a whole number from 1 on"),
        ({"maxBytes": "0"}, "maxBytes is '0'"),
        ({"targetMs": "-1"}, "targetMs is '-1'. To fix it: write a whole number from 0 on"),
        ({"partitions": "1.5"}, "partitions is '1.5'"),
        ({"startingCursor": "now"}, "startingCursor is 'now'. To fix it: write earliest, latest"),
        ({"endingCursor": "16/B:x"}, "endingCursor is '16/B:x'"),
        ({"table": "item"}, "table is 'item'. To fix it: write schema and table"),
        ({"table": "public."}, "table is 'public.'"),
        ({"table": "public.item", "exchange": "/x"}, "exclude each other"),
        ({"path": ""}, "no path"),
    ],
)
def test_options_that_cannot_be_used_are_refused_by_name(given: dict[str, str], says: str) -> None:
    with pytest.raises(ConfigError) as refused:
        Options.read({"path": "/log/shop"} | given)
    assert says in str(refused.value)


def test_the_page_has_every_option_with_its_default() -> None:
    text = PAGE.read_text(encoding="utf-8").partition("## Two schemas")[0]
    told = dict(re.findall(r"^\| `(\w+)` \| (?:([^|]+) )?\|", text, re.MULTILINE))
    public = {name: value for name, value in _DEFAULTS.items() if name not in _OURS}
    in_words = {"path": "required", "table": "", "partitions": "the cores of the driver's machine"}
    assert told == {name: in_words.get(name, f"`{value}`") for name, value in public.items()}
    assert all(f"`{name}`" in text for name in _OURS)
