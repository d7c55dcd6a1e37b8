"""Everything that knows a file format."""
