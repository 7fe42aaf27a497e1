"""Filters, transforms and routings of consumers: Spark SQL expressions, or Python functions.

``compiled`` is what a consumer asks for and whether a table can satisfy it, ``rules`` what an
expression may do, ``visible_rows`` what it sees of a change, ``engine`` Spark's evaluator without
a job, ``functions`` the operator's own Python, ``evaluate`` the verdicts over changes,
``on_executors`` those over a range of the log. ``delivery.verdicts`` lays them over messages, and
``session.expressions_check`` checks every expression before the service starts.
"""
