"""Everything that depends on a file format."""
