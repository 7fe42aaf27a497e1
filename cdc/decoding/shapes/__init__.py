"""Message shapes: how a consumer sees a change. One module per shape, each by whole columns.

``base`` is the seam: whatever a sink does with a message it does through a ``Shape``. A new form of
message, a binary one included, is one more module here and one more name in ``SHAPES``.
"""

from __future__ import annotations

from cdc.decoding.shapes.base import Context, Parts, Shape, ShapeName
from cdc.decoding.shapes.debezium import DebeziumShape
from cdc.decoding.shapes.record import RecordShape, RowTextShape
from cdc.decoding.shapes.sequin import SequinShape
from cdc.decoding.shapes.transformed import TransformedShape

__all__ = [
    "SHAPES",
    "Context",
    "Parts",
    "RecordShape",
    "RowTextShape",
    "Shape",
    "ShapeName",
    "shape_for",
]

SHAPES: dict[ShapeName, type[SequinShape | DebeziumShape | RecordShape]] = {
    "sequin": SequinShape,
    "debezium": DebeziumShape,
    "record": RecordShape,
}


def shape_for(
    name: ShapeName, context: Context, *, transformed: bool = False, schemas: bool = False
) -> Shape:
    """The shape called ``name`` for one consumer, around what its transform made of changes.

    ``schemas`` has a meaning for ``debezium`` alone.
    """
    plain = DebeziumShape(context, schemas=True) if schemas else SHAPES[name](context)
    return TransformedShape(context, plain) if transformed else plain
