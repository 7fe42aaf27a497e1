"""The HTTP API under ``/api``: a thin layer over the SQL functions.

Every route is made by ``routes.guarded``, which checks the token (``tokens``) and writes refusals
as JSON (``refusals``). Invariant: nothing here decides what SQL decides, no token is
ever written anywhere, and every wait and every answer has a bound.
"""
