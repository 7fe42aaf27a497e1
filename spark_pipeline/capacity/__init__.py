"""What the driver can do at once: delivery slots, pressure, and what is deferred under it."""
