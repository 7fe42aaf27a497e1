"""What opening, checking and repairing a log takes."""
