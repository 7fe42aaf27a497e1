"""The log over Arrow Flight, for readers on other machines."""
