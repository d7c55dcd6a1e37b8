"""Tests of jspec, laid out as the package is."""
