"""Values, messages, buckets and atomic files."""
