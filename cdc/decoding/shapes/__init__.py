"""Message shapes: how a consumer sees a change. One module a shape, each by whole columns."""
