"""Draft length that follows the batch."""
