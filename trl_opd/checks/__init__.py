"""What can be known to be wrong before any training: one finding, one function."""
