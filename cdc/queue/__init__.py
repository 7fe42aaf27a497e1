"""The queue room: what groups messages belong to, and what pull consumers hold of their queue.

It owns the unit of order and the Python side of ``walbrook.receive``, ``ack``, ``nack`` and
``extend``; what decides who gets what is SQL, in ``migrations``.
"""
