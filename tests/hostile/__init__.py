"""Tests with malicious, damaged or absurd input."""
