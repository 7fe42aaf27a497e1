"""Filters, transforms and routings of consumers: Spark SQL expressions, or Python functions.

``compiled`` is what a consumer asks for and whether a table can satisfy it, ``rules`` what an
expression may do, ``seen`` what it sees of a change, ``engine`` Spark's evaluator without a job,
``functions`` the operator's own Python, ``evaluate`` the verdicts over changes, ``from_log`` those
over a stretch of the log, ``verdicts`` how they are laid over messages, ``tables`` the check of
every expression before the service starts.
"""
